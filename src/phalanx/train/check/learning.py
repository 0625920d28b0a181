"""Whether a first step would teach the model anything: the loss depends on it, is a number, and is one function."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import gathering
from phalanx.errors import WrongUse
from phalanx.parallel.randomness.answers import drew, generator_state
from phalanx.parallel.torch_private import version
from phalanx.torch_errors import About, is_about
from phalanx.train.check import lines
from phalanx.train.check.misuse import Misuse
from phalanx.train.check.subject import Fails, Given, ModuleCall, Subject, moved, tensors_in, unless_said
from phalanx.train.optimizers import untrainable
from phalanx.train.step import independent
from phalanx.trees import leaves
from phalanx.words import listed

SHOWN = 3
FUNCTION = "Make it depend on its inputs, its weights and torch's random functions alone"
TWICE = "is not deterministic: a batch computed twice on one device gives two losses"
KNOWN = ("_parameters", "_buffers", "_modules")


def owner(model: nn.Module, name: str) -> nn.Module:
    """A module, or the nearest around it whose class is the user's."""
    while name:
        module = model.get_submodule(name)
        if lines.of(type(module)):
            return module
        name = name.rpartition(".")[0]
    return model


def place(subject: Subject, name: str) -> str:
    """Where a module's forward is in the user's files, or that of the nearest around it, or where it is made."""
    kind = type(owner(subject.model, name))
    return lines.first_of(kind.forward, kind, type(subject.task).model)


def named(subject: Subject, name: str) -> str:
    module = subject.model.get_submodule(name)
    return f"{name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def check_learning(subject: Subject, pretrained: bool) -> list[str]:
    """Forward and backward of a batch, twice; returns what is only likely to be a mistake."""
    misuse = Misuse()
    subject.model.train()
    batch = subject.batch(subject.places)
    before = generator_state(torch.device("cpu"))
    fresh = {name: [version(tensor) for tensor in tensors_in(column)] for name, column in batch.items()}
    asked = gathering.calls
    weights = {name: weight.detach().clone() for name, weight in subject.model.named_parameters()}
    with lines.returns(type(subject.task).loss) as returned, misuse:
        try:
            given = subject.compute(subject.places, batch, watch=True)
        except WrongUse as refusal:  # of what the loss returned
            raise type(refusal)(f"{refusal}{unless_said(returned(), str(refusal))}") from refusal
    if moved(before):
        raise _draws(subject)
    _check_untouched(subject, weights)
    changed = [n for n, known in fresh.items() if [version(t) for t in tensors_in(batch.get(n))] != known]
    _check_depends(subject, given, returned())
    _check_finite(subject, given, returned(), pretrained)
    _backward(subject, given)
    misuse.check_targets()
    found = [*misuse.found, *_check_gradients(subject, given, pretrained, misuse.detached)]
    if changed:
        found.append(_changed_batch(subject, changed[0]))
        if gathering.calls != asked:  # which computes a batch twice where it is cut into several
            raise WrongUse(found[-1])
    _check_again(subject, given)
    return found


def _changed_batch(subject: Subject, name: str) -> str:
    """Where a column of a batch is changed in place."""
    batch = subject.batch(subject.places)
    (first, *_) = tensors_in(batch[name])
    with lines.that_changes(lambda: version(first)) as line:
        subject.compute(subject.places, batch)
    return (
        f"{subject.name} changes {name!r} of a batch in place{lines.at(line())}: whoever reads it afterwards, as loss "
        "and evaluate may, gets something else. Change a copy: x = x - 1 instead of x -= 1."
    )


def _draws(subject: Subject) -> WrongUse:
    batch = subject.batch(subject.places)
    with lines.that_draws() as found:
        subject.compute(subject.places, batch)
    return drew(lines.at(found()))


def _check_untouched(subject: Subject, before: dict[str, Tensor]) -> None:
    """Computing a loss must not train."""
    task, name = subject.task, subject.name
    weights = dict(subject.model.named_parameters())
    if new := sorted(set(weights) - set(before)):
        raise WrongUse(
            f"the forward of {type(subject.model).__name__} makes weights: {new[0]} was not there before the first "
            f"batch, and no optimizer knows it{lines.at(place(subject, new[0].rpartition('.')[0]))}. Make them in the "
            "constructor, with sizes that it states."
        )
    where = lines.at(lines.of(type(task).loss))
    if any(weight.grad is not None for weight in weights.values()):
        raise WrongUse(
            f"{name}.loss calls backward() itself{where}, and its gradients would be counted twice. Return "
            "phalanx.Loss(total, count); the step does the rest."
        )
    kept = {n for n, m in subject.model.named_modules() if getattr(m, "max_norm", None) is None}
    trained = {n: w.detach() for n, w in weights.items() if w.requires_grad and n.rpartition(".")[0] in kept}
    changed = [n for n, weight in trained.items() if not torch.equal(weight.nan_to_num(), before[n].nan_to_num())]
    if changed:
        raise WrongUse(
            f"{changed[0]} changes while a loss is computed{lines.at(place(subject, changed[0].rpartition('.')[0]))}. "
            "Leave updates to the optimizer; what forward itself keeps belongs into a buffer."
        )
    quiet = [n for n, module in subject.model.named_modules() if not module.training]
    if quiet and type(subject.model).train is nn.Module.train and not subject.model.training:
        raise WrongUse(
            f"the forward of {type(subject.model).__name__} switches it to eval(){lines.at(place(subject, ''))}, so "
            "that dropout is off and batch-norms learn nothing. Leave that out: training and evaluation set it."
        )


def _check_depends(subject: Subject, given: Given, returned: str) -> None:
    if not any(weight.requires_grad for weight in subject.model.parameters()):
        raise untrainable(subject.task)
    if given.loss.total.requires_grad:
        return
    where, line = "", returned
    if not any(tensor.requires_grad for tensor in tensors_in(given.output)):
        cut = next((e for e in given.modules if not e.attached and _trains(e.module)), None)
        name = cut.name if cut else ""
        where, line = f", since the output of {named(subject, name)} does not", place(subject, name)
    raise independent(subject.task, f"{where}{lines.at(line)}")


def _trains(module: nn.Module) -> bool:
    return any(weight.requires_grad for weight in module.parameters())


def _finite(tensors: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point())


def _check_finite(subject: Subject, given: Given, returned: str, pretrained: bool) -> None:
    total = given.loss.total.detach()
    if bool(torch.isfinite(total).all()) or pretrained or not _finite(tensors_in(given.batch)):
        return  # weights that are not there yet, or a sample that is bad, of which more is said elsewhere
    if not _finite(tensors_in(given.inputs)):
        what, line = f"what {subject.name}.inputs gives", lines.of(type(subject.task).inputs)
    elif (bad := _first_bad(given.modules)) is not None:
        what, line = f"the output of {named(subject, bad.name)}", place(subject, bad.name)
    elif not _finite(tensors_in(given.output)):
        what, line = f"the output of {named(subject, '')}", place(subject, "")
    else:
        what, line = f"{subject.name}.loss, whose output is finite,", returned
    raise WrongUse(
        f"the loss of the first batch is {float(total.sum())}, though its samples are finite: first of all {what} is "
        f"not{lines.at(line)}. Look there for a log or a root of 0, a division by 0, a mask that leaves nothing, or "
        "weights that are never initialised."
    )


def _first_bad(modules: list[ModuleCall]) -> ModuleCall | None:
    return next((e for e in modules if not _finite(e.gave) and _finite(e.got)), None)


def _backward(subject: Subject, given: Given) -> None:
    try:
        given.loss.total.backward()
    except RuntimeError as error:
        if is_about(error, About.BACKWARD_AGAIN):
            raise WrongUse(
                f"{subject.name} keeps something of one batch for the next, with its gradients"
                f"{lines.at(_kept(subject))}. Detach what is kept, or begin each batch anew."
            ) from error
        if is_about(error, About.IN_PLACE):
            raise WrongUse(
                f"{subject.name} changes something in place that backward needs as it was"
                f"{lines.at(_changed_later(subject))}. Write y = y + x instead of y += x, and leave out inplace=True "
                "and functions whose names end in an underscore."
            ) from error
        raise Fails("backward", error) from error
    for weight in subject.model.parameters():
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.to_dense()  # as ranks make it before they sum


def _changed_later(subject: Subject) -> str:
    """The line that computed what was changed after it; torch tells it in a warning."""
    with warnings.catch_warnings(record=True) as told, suppress(RuntimeError):
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=False):
            subject.compute(subject.places).loss.total.backward()
    return lines.last_in("".join(str(warning.message) for warning in told))


def _kept(subject: Subject) -> str:
    """The class of the module that holds a tensor of a graph."""
    for name, module in subject.model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in KNOWN and any(t.grad_fn is not None for t in tensors_in(value)):
                return place(subject, name)
    return lines.first_of(type(subject.task).loss)


def _check_gradients(subject: Subject, given: Given, pretrained: bool, detached: str) -> list[str]:
    model = subject.model
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for name, weight in weights.items():
        if weight.grad is not None and not _finite([weight.grad]) and _finite([given.loss.total]) and not pretrained:
            raise WrongUse(
                f"the loss of the first batch is finite, and the gradient of {name} is not"
                f"{lines.at(place(subject, name.rpartition('.')[0]))}. Look for a root or a norm of 0, or a where() "
                "whose other branch is not finite: give it a small eps, or mask before, not after."
            )
    for holder, attribute in _unregistered(model):
        raise WrongUse(
            f"{attribute} of {named(subject, holder)} gets gradients, and is no parameter of the model, so it is "
            f"neither trained nor saved{lines.at(_made_at(subject, holder))}. Keep modules in an nn.ModuleList or "
            "nn.ModuleDict, and tensors as nn.Parameter."
        )
    cut = {ended.name for ended in given.modules if not ended.attached and ended.gave}
    cut -= {ended.name for ended in given.modules if ended.attached}
    if detached:
        cut |= {ended.name for ended in given.modules if ended.gave and not list(ended.module.children())}
    without = [n for n, w in weights.items() if w.grad is None and n.rpartition(".")[0] in cut]
    if without:
        where = lines.at(detached or place(subject, without[0].rpartition(".")[0]))
        return [
            f"{listed(without, SHOWN)} take part in the forward and get no gradient from the loss{where}: "
            "is something detached, or under no_grad()? If that is meant, set requires_grad to False for them."
        ]
    nothing = not float(torch.as_tensor(given.loss.count).sum())  # every target is ignored, here
    return [] if pretrained or nothing else _check_alive(subject, weights)


def _check_alive(subject: Subject, weights: Mapping[str, nn.Parameter]) -> list[str]:
    """Weights that begin so that they cannot learn."""
    matrices = {name: w for name, w in weights.items() if w.ndim > 1 and w.grad is not None}
    if matrices and not any(bool(w.grad.any()) for w in matrices.values() if w.grad is not None):
        where = lines.at(lines.of(type(subject.task).model))
        return [
            f"every gradient of {listed(list(matrices), SHOWN)} is 0 for the first batch{where}: nothing but biases "
            "would be learned. Begin with weights that are drawn, and look for an activation that is 0 everywhere."
        ]
    for name, weight in matrices.items():
        if weight.grad is not None and bool(weight.grad.any()) and _alike(weight.detach()) and _alike(weight.grad):
            return [
                f"all rows of {name} are the same and get the same gradient"
                f"{lines.at(_made_at(subject, name.rpartition('.')[0]))}: they will stay the same, as if the layer had "
                "one unit. Begin with weights that are drawn."
            ]
    return []


def _alike(rows: Tensor) -> bool:
    return len(rows) > 1 and bool(torch.allclose(rows, rows[:1].expand_as(rows), rtol=1e-5, atol=0.0))


def _made_at(subject: Subject, name: str) -> str:
    kind = type(owner(subject.model, name))
    return lines.first_of(kind.__init__, kind, type(subject.task).model)


def _unregistered(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Tensors with a gradient that modules hold without registering them: whose, and by what name."""
    known = {id(weight) for weight in model.parameters()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in KNOWN:
                continue
            for tensor in _held(value):
                if tensor.is_leaf and tensor.grad is not None and id(tensor) not in known:
                    yield name, attribute
                    break


def _held(value: Any) -> Iterator[Tensor]:
    for leaf in leaves(value, (Tensor, nn.Module)):
        yield from leaf.parameters() if isinstance(leaf, nn.Module) else [leaf]


def _check_again(subject: Subject, once: Given) -> None:
    """The same batch must give the same, however often it is computed, and need nothing of the one before."""
    subject.model.zero_grad()
    with torch.no_grad():
        again = subject.compute(subject.places)
    one, two = once.loss.total.detach(), again.loss.total.detach()
    if not torch.equal(one.nan_to_num(), two.nan_to_num()):  # some of torch's kernels differ where there are gradients
        two = subject.compute(subject.places).loss.total.detach()
    if torch.equal(one.nan_to_num(), two.nan_to_num()):
        _backward(subject, subject.compute(subject.places[:2]))
        subject.model.zero_grad()
        return
    records = []
    for _ in range(2):
        with lines.Calls() as calls:
            subject.compute(subject.places)
        records.append(calls.made)
    line = next((c.line for c in records[0] if c.generator), "")
    for a, b in zip(*records, strict=False):
        if line or a.name != b.name or not _same(a.given, b.given):
            line = line or a.line
            break
    own = " a torch.Generator or" if any(c.generator for c in records[0]) else ""
    raise WrongUse(
        f"{subject.name} {TWICE}, {float(one):.6g} and {float(two):.6g}{lines.at(line)}. {FUNCTION}: what{own} Python "
        "or numpy draws in forward or loss, and what a module counts in an attribute, cannot be kept the same on every "
        "layout."
    )


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, two, strict=True)
    )
