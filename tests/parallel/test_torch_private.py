"""Private names of torch: these fail first, and clearly, when torch moves."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.parallel import torch_private
from tests.ranks import Ranks


def test_views_share_a_storage_and_copies_do_not() -> None:
    x = torch.zeros(4)
    assert torch_private.storage_id(x) == torch_private.storage_id(x[1:]) == torch_private.storage_id(x.detach())
    assert torch_private.storage_id(x) != torch_private.storage_id(x.clone())


def test_weights_in_one_memory_have_places_of_their_own() -> None:
    room = torch.zeros(8)
    first, second = room[:4], room[4:]
    assert torch_private.storage_id(first) == torch_private.storage_id(second)
    assert torch_private.place_in_memory(first) == torch_private.place_in_memory(room[:2])
    assert torch_private.place_in_memory(first) != torch_private.place_in_memory(second)


def test_where_compilers_keep_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    found = torch_private.compiler_folders()
    assert found["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    monkeypatch.setenv("TRITON_HOME", "/somewhere")
    assert torch_private.compiler_folders()["TRITON_CACHE_DIR"] == "/somewhere/.triton/cache"
    knobs = pytest.importorskip("triton.knobs", reason="triton is not installed (the dev extra has it)")
    assert knobs.cache.get_triton_dir("cache") == "/somewhere/.triton/cache"


def test_in_place_operations_are_known() -> None:
    assert torch_private.mutates(torch.ops.aten.add_.Tensor)
    assert not torch_private.mutates(torch.ops.aten.add.Tensor)


def test_fake_tensors_say_they_are_on_the_cpu_and_hold_nothing() -> None:
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True):
        huge = torch.empty(1 << 40)
    assert isinstance(huge, torch_private.FakeTensor)
    assert huge.device.type == "cpu"
    assert not huge.is_meta


def test_a_parameter_is_put_in_place() -> None:
    layer, fresh = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))
    torch_private.install(layer, "weight", fresh)
    assert layer.weight is fresh
    assert dict(layer.named_parameters())["weight"] is fresh
    cell, recurrent = nn.LSTM(2, 2), nn.Parameter(torch.zeros(8, 2))
    torch_private.install(cell, "weight_ih_l0", recurrent)
    assert not cell(torch.ones(1, 2))[0].isnan().any()
    assert any(weight is recurrent for weight in cell._flat_weights)


def test_parameters_are_put_in_place_together() -> None:
    layer, cell = nn.Linear(2, 2), nn.LSTM(2, 2)
    fresh, recurrent = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(8, 2))
    install = torch_private.installer([(layer, "weight", fresh), (cell, "weight_ih_l0", recurrent)])
    for _ in range(2):
        layer.weight, cell.weight_ih_l0 = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(8, 2))
        install()
        assert layer.weight is fresh
        assert any(weight is recurrent for weight in cell._flat_weights)


def test_described_weights_are_converted_in_place() -> None:
    with torch_private.FakeTensorMode(), torch_private.converting_in_place():
        layer = nn.Linear(2, 2)
        weight = layer.weight
        layer.to(torch.bfloat16)
    assert layer.weight is weight
    assert weight.dtype == layer.bias.dtype == torch.bfloat16
    assert nn.Linear(2, 2).half().weight.dtype == torch.float16, "torch's own is back"


def test_a_dispatch_mode_sees_operations_below_autograd() -> None:
    seen = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.zeros(2).add_(1)
    assert torch.ops.aten.add_.Tensor in seen


def test_preloading_imports_what_an_optimizer_would() -> None:
    torch_private.preload()
    assert "torch._dynamo" in sys.modules


def test_hooks_of_an_optimizer_are_seen() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight])
    assert not torch_private.has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer)
    handle.remove()
    assert not torch_private.has_step_hooks(optimizer)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert torch_private.has_step_hooks(optimizer)
    handle.remove()


def test_a_number_is_added_to_each() -> None:
    numbers = [torch.zeros(()), torch.ones(2)]
    torch_private.add_to_each(numbers, 1)
    assert [number.tolist() for number in numbers] == [1.0, [2.0, 2.0]]


def test_the_norm_of_each() -> None:
    tensors = [torch.tensor([3.0, 4.0]).bfloat16(), torch.full((1001,), 1.01).bfloat16(), torch.zeros(0).bfloat16()]
    found = torch_private.norms(tensors, torch.float32)
    assert found.dtype == torch.float32
    assert found.tolist() == [float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) for tensor in tensors]


def test_a_subclass_is_not_asked_where_tensors_are_plain() -> None:
    class Refusing(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.__class__ = Refusing  # as torch's own lazy parameters change theirs
    with torch_private.as_plain_tensors():
        assert parameter.data.sum() == 2
    with pytest.raises(AssertionError):
        parameter.sum()


def test_what_made_a_view_is_still_run_backward_when_that_is_changed_in_place() -> None:
    weight, seen = torch.ones(3, 3, requires_grad=True), list[int]()
    view = torch.nn.functional.linear(torch.ones(2, 4, 3), weight, torch.zeros(3))
    for number, node in enumerate(torch_private.made_by(view)):
        node.register_prehook(lambda gradients, number=number: seen.append(number))  # type: ignore[misc]
    view.relu_().sum().backward()
    assert seen == [1], "the node of the view is not in the graph any more"
    assert len(torch_private.made_by(weight * 2)) == 1
    assert torch_private.made_by(weight) == []


def test_writing_in_place_is_counted() -> None:
    weight = torch.zeros(2)
    before = torch_private.version(weight)
    weight.view(-1)[0] = 1
    assert torch_private.version(weight) > before


def group_facts() -> tuple[str, str, list[int], int]:
    rank = dist.get_rank()
    group = torch_private.new_group((0, 1), rank, "a name", timedelta(seconds=17), "described", None)
    found = group.group_name, group.group_desc, dist.get_process_group_ranks(group), dist.get_rank(group)
    dist.destroy_process_group(group)
    return found


def test_a_group_has_the_name_it_was_given(ranks: Ranks) -> None:
    assert ranks(2, group_facts) == [("a name", "described", [0, 1], rank) for rank in range(2)]


def count() -> int:
    return torch_private.default_store().add("a number", 1)


def test_the_world_has_a_store(ranks: Ranks) -> None:
    assert sorted(ranks(2, count)) == [1, 2]


def test_attention_is_one_of_these_operations() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(1, 2, 4, 8)
    with Watch():
        F.scaled_dot_product_attention(x, x, x)
    assert set(seen) & set(torch_private.ATTENTION)


def test_a_product_of_scaled_numbers_has_a_shape_and_a_name() -> None:
    called = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **kwargs or {})

    with torch_private.FakeTensorMode(), Notes():
        one, other = (torch.empty(n, 32, dtype=torch.float8_e4m3fn, device="cuda") for n in (48, 16))
        by = torch.empty((), device="cuda")
        found = torch_private.scaled_product(one, other.t(), by, by, torch.bfloat16)
    assert found.shape == (48, 16)
    assert found.dtype == torch.bfloat16
    assert torch_private.SCALED_PRODUCT in called


def test_each_is_copied_to_its_own_whatever_its_dtype() -> None:
    targets = list(torch.zeros(5).split([2, 3]))
    torch_private.copy_each(targets, [torch.ones(2, dtype=torch.float64), torch.full((3,), 2.0)])
    assert torch.cat(targets).tolist() == [1, 1, 2, 2, 2]


def test_a_grouped_product_becomes_what_recompute_keeps() -> None:
    called: list[Any] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    x, weights = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(2, 8, 16, dtype=torch.bfloat16)
    with Calls():
        found = torch.nn.functional.grouped_mm(x, weights, offs=torch.tensor([1, 4], dtype=torch.int32))
    assert found.shape == (4, 16)
    assert torch_private.GROUPED_PRODUCT in called


def test_whether_the_compiler_is_loaded_is_known() -> None:
    assert torch_private.compiler_is_loaded() == ("torch._dynamo" in sys.modules)
    torch.compile(lambda x: x, backend="eager")(torch.ones(1))
    assert torch_private.compiler_is_loaded()


def test_functions_that_are_compiled_are_counted_with_their_seconds() -> None:
    double = torch.compile(lambda numbers: numbers * 2, backend="eager", dynamic=False)
    double(torch.ones(2))
    before = torch_private.compiled_frames()
    double(torch.ones(2))
    assert torch_private.compiled_frames() == before
    double(torch.ones(3))
    double(torch.ones(4))
    assert torch_private.compiled_frames() == before + 2
    assert torch_private.compile_seconds(2) > torch_private.compile_seconds(1) > 0
    assert torch_private.compile_seconds(0) == 0


def test_attention_of_variable_lengths_is_known_by_name() -> None:
    importlib.import_module("torch.nn.attention.varlen")
    assert str(torch.ops.torch_attn._varlen_attn.default) == torch_private.PACKED_ATTENTION


def test_one_program_is_for_any_size_of_a_dim() -> None:
    plus_one = torch.compile(lambda x: x + 1, backend="eager")  # the compiler is loaded with it
    before = torch_private.compiled_frames()
    for size in (16, 32, 64):
        assert plus_one(torch_private.of_any_size(torch.zeros(2, size), 1)).shape == (2, size)
    assert torch_private.compiled_frames() == before + 1


def test_calls_of_torchs_checkpoint_ask_how_to_run() -> None:
    from torch.utils.checkpoint import checkpoint  # as models import it, before anything is answered

    asked: list[Any] = []
    again: list[Any] = []

    def answer(function: Any) -> torch_private.Checkpointed:
        asked.append(function)
        return torch_private.Checkpointed(again=lambda *args: again.append(args) or function(*args))

    x = torch.ones(3, requires_grad=True)
    with torch_private.CheckpointAnswers(answer):
        for reentrant in (True, False):
            checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
        with torch.no_grad():
            checkpoint(torch.cos, x, use_reentrant=False)
        plain = checkpoint(torch_private.AsTorchDoes(torch.exp), x, use_reentrant=False)
    assert asked == [torch.sin, torch.sin]
    assert len(again) == 2, "each is run once more in backward"
    assert torch.allclose(x.grad, 2 * torch.ones(3).cos())
    plain.sum().backward()
    assert type(checkpoint(torch.sin, x, use_reentrant=True).grad_fn).__name__ == "CheckpointFunctionBackward"
    with torch_private.CheckpointAnswers(lambda function: torch_private.Checkpointed()):
        assert checkpoint(torch.sin, x, use_reentrant=True).grad_fn.name() == "SinBackward0"
