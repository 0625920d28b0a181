"""Data: order, loading, packing, and the formats people have. A data set is anything with ``len()`` and ``[i]``."""

from phalanx.data.arrays import Arrays, Images
from phalanx.data.by_length import ByLength
from phalanx.data.mixing import CutMix, Mixup
from phalanx.data.mixture import Joined, Mixture
from phalanx.data.named import Named
from phalanx.data.shards import Shards
from phalanx.data.splitting import split
from phalanx.data.streaming import StreamedFiles, StreamedSamples
from phalanx.data.text import JsonLines, Parquet
from phalanx.data.token_files import PackedFiles, TokenFiles
from phalanx.data.token_folder import tokenize
from phalanx.data.tokens import PackedTokens, TokenFile, write_tokens

__all__ = [
    "Arrays", "ByLength", "CutMix", "Images", "Joined", "JsonLines", "Mixture", "Mixup", "Named", "PackedFiles",
    "PackedTokens", "Parquet", "Shards", "StreamedFiles", "StreamedSamples", "TokenFile", "TokenFiles", "split",
    "tokenize", "write_tokens",
]  # fmt: skip
