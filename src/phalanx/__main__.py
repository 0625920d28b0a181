"""``python -m phalanx``: the command line, where its script is not on the path."""

from phalanx.cli import main

if __name__ == "__main__":
    main()
