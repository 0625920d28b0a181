"""Names for data sets whose samples are tuples."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import Subset, TensorDataset

from phalanx.data.columns import column_of, no_column
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

    def column(self, name: str) -> Any:
        """A column of all samples; of torchvision's data sets the last one, which they keep as ``targets``."""
        if name not in self.names:
            raise no_column(name, self.names)
        if name == self.names[-1] and hasattr(self.data, "targets"):
            return self.data.targets
        if isinstance(self.data, Subset):
            whole = Named(self.data.dataset, *self.names).column(name)
            return np.asarray(whole)[np.asarray(self.data.indices)]
        if isinstance(self.data, TensorDataset):
            return self.data.tensors[self.names.index(name)]
        if isinstance(self.data, (list, tuple)):
            return [sample[self.names.index(name)] for sample in self.data]
        return column_of(self.data, name)
