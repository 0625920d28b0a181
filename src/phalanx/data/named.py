"""Names for data sets whose samples are tuples."""

from __future__ import annotations

from typing import Any

from phalanx.errors import WrongUse
from phalanx.traces import described


class Named:
    """Names for a data set of tuples, as torchvision's are: ``Named(dataset, "image", "label")``."""

    def __init__(self, data: Any, *names: str) -> None:
        if not names:
            raise WrongUse('Named() has no names. Name what a sample holds, e.g. Named(dataset, "image", "label").')
        self.data, self.names = data, names

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        values = self.data[index]
        if not isinstance(values, (tuple, list)) or len(values) != len(self.names):
            raise WrongUse(
                f"sample {index} is {described(values)}, for which there are {len(self.names)} names: "
                f"{', '.join(self.names)}. Give as many as it has values."
            )
        return dict(zip(self.names, values, strict=True))
