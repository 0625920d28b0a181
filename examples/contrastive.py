from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import phalanx


class Towers(nn.Module):
    """Pictures and captions of one thing, led to the same place on a sphere."""

    def __init__(self, width):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 16))
        self.caption = nn.Sequential(nn.Embedding(100, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, picture, caption):
        pictures, captions = self.picture(picture), self.caption(caption).mean(1)
        return F.normalize(pictures, dim=-1), F.normalize(captions, dim=-1), self.scale.exp()


@dataclass
class Contrastive(phalanx.Task):
    """Which caption belongs to which picture, among all of the global batch?"""

    width: int = 64
    global_batch: int = 60
    steps: int = 300
    learning_rate: float = 1e-2
    evaluate_every: int = 100

    def model(self):
        return Towers(self.width)

    def data(self):
        return pairs(0, 2000)

    def held_out(self):
        return pairs(2000, 2300)

    def inputs(self, batch):
        return batch["picture"], batch["caption"]

    def loss(self, output, batch):
        pictures, captions, scale = output
        own = phalanx.rows(pictures)
        to_captions = F.cross_entropy(scale * pictures @ phalanx.gather(captions).T, own, reduction="sum")
        to_pictures = F.cross_entropy(scale * captions @ phalanx.gather(pictures).T, own, reduction="sum")
        return phalanx.Loss((to_captions + to_pictures) / 2, len(own))

    def evaluate(self, output, batch):
        pictures, captions, _ = output
        found = (pictures @ phalanx.gather(captions).T).argmax(1)
        return {
            "loss": self.loss(output, batch),
            "found": phalanx.Loss((found == phalanx.rows(found)).sum(), len(found)),
        }


def pairs(start, stop):
    """A thing is five words; its picture shows each of them, and noise."""
    source = torch.Generator().manual_seed(0)
    words = torch.randint(0, 100, (2300, 5), generator=source)
    look = torch.randn(100, 32, generator=source)
    picture = look[words].sum(1) + 0.3 * torch.randn(2300, 32, generator=source)
    return phalanx.data.Arrays(picture=picture[start:stop], caption=words[start:stop])
