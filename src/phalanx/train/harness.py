"""Runs for lm-evaluation-harness: importing this file registers its model ``phalanx``, of a run or an exported folder.

python -m phalanx.train.harness run --model phalanx --model_args run=runs/sft-001 --tasks ...   is ``lm_eval`` with it
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phalanx.errors import CannotHere, WrongUse
from phalanx.run import Run
from phalanx.train.exporting import export_run

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise CannotHere(
        f"lm-evaluation-harness is not here ({error}). Install it: pip install 'phalanx[evaluate]'"
    ) from None


@register_model("phalanx")
class HarnessModel(HFLM):
    """A causal language model that a run has trained: likelihoods of texts, and answers.

    ``run``: its folder, of which the last checkpoint is taken, or that of the step ``checkpoint``; LoRA is merged into
    its base. ``folder``: what ``phalanx export`` wrote. ``trust``: run the code that another user's run.toml names.
    Other options are those of the harness's own ``hf``.
    """

    def __init__(
        self, run: str | None = None, folder: str | None = None, checkpoint: int | None = None, trust: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        if (run is None) == (folder is None):
            raise WrongUse("the model phalanx is of a run or of a folder. Give run=runs/NAME, or folder=DIR.")
        if folder is not None and checkpoint is not None:
            raise WrongUse("checkpoint is of a run, and a folder holds one already. Leave it out.")
        with TemporaryDirectory(prefix="phalanx-harness-") as aside:
            if run is not None:
                folder = str(Path(aside) / "model")
                lora = bool(Run(run).settings().get("settings", {}).get("lora"))
                step = None if checkpoint is None else int(checkpoint)
                export_run(Path(run), Path(folder), "hf", step, merge=lora, trust=trust)
            if not (Path(str(folder)) / "config.json").is_file():
                raise WrongUse(f"{folder} holds no model of Hugging Face's. Give what phalanx export wrote.")
            super().__init__(pretrained=str(folder), **options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
