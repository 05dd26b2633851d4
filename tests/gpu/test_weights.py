"""Weights that come and go: nothing of a module is lost, nothing that is gone is read, a failure leaves them cleanly evicted."""

import gc
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from tangram.executors.gpu.device import CpuDevice, host_budget_bytes
from tangram.executors.gpu.errors import Broken, Busy, Evicted, Refused
from tangram.executors.gpu.ledger import DeviceFull, Ledger
from tangram.executors.gpu.weights import Weights

MIB = 1 << 20


def cycle(weights: Weights, times: int = 3) -> None:
    """Left resident."""
    weights.restore()
    for _ in range(times):
        weights.evict()
        weights.restore()


# --- nothing is lost ---------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Parameters, buffers of both kinds, and tensors that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("rope", torch.arange(8.0), persistent=False)
        self.scale = torch.tensor([2.0, 3.0])
        self.cache = {"keys": [torch.ones(3), torch.zeros(2)], "none": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x) + self.rope) * self.scale.sum() + self.cache["keys"][0].sum()  # type: ignore[index]


def test_buffers_of_both_kinds_and_plain_tensors_come_back(device: CpuDevice) -> None:
    module = Everything().eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        before = module(x)
        weights = Weights("s", [module], device)
        cycle(weights)
        assert torch.equal(module(x), before)
    assert {"rope", "scale", "cache['keys'][0]", "norm.running_mean"} <= set(weights.names)


def test_what_a_forward_pass_writes_is_written_back(device: CpuDevice) -> None:
    module = Everything().train()
    weights = Weights("s", [module], device)
    weights.restore()
    with torch.no_grad():
        module(torch.randn(16, 8))
    seen = module.norm.running_mean.clone()
    moved = weights.evict()
    weights.restore()
    assert 0 < moved.written_back < weights.size
    assert torch.equal(module.norm.running_mean, seen)
    assert int(module.norm.num_batches_tracked) == 1


def test_parameters_that_were_written_in_place_are_written_back(device: CpuDevice) -> None:
    module = nn.Linear(8, 8)
    weights = Weights("s", [module], device)
    weights.restore()
    with torch.no_grad():
        module.weight.add_(1)
    module.load_state_dict({"weight": module.weight + 1, "bias": torch.ones(8)})
    seen = module.weight.clone()
    weights.evict()
    weights.restore()
    assert torch.equal(module.weight, seen)
    assert torch.equal(module.bias, torch.ones(8))


def test_an_eviction_without_writes_copies_nothing(device: CpuDevice) -> None:
    weights = Weights("s", [nn.Linear(64, 64)], device)
    weights.restore()
    assert weights.evict().written_back == 0


def test_ties_stay_ties_and_take_their_bytes_once(device: CpuDevice) -> None:
    one, two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    two.weight = one.weight
    third = nn.Linear(64, 64, bias=False)
    third.weight.data = one.weight.data
    root = nn.ModuleList([one, two, third])
    weights = Weights("s", [root], device)
    assert weights.size == 64 * 64 * 4
    cycle(weights)
    assert one.weight is two.weight
    with torch.no_grad():
        one.weight[0, 0] = 7.0
    assert third.weight[0, 0] == 7.0


def test_a_tie_between_two_modules_of_a_service_holds_and_both_are_restored(device: CpuDevice) -> None:
    """As a draft model shares its embedding with the one that checks it."""
    target, draft = nn.Embedding(16, 8), nn.Embedding(16, 8)
    draft.weight = target.weight
    head = nn.Linear(8, 4)
    seen = head.weight.clone()
    weights = Weights("s", [target, nn.Sequential(draft, head)], device)
    cycle(weights)
    assert draft.weight is target.weight
    assert torch.equal(head.weight, seen)


def test_views_of_one_storage_keep_their_offsets_and_strides(device: CpuDevice) -> None:
    module = nn.Module()
    qkv = torch.randn(12, 4)
    module.q, module.k, module.v = qkv[:4], qkv[4:8], qkv[8:]
    module.turned = torch.randn(3, 5).t()
    module.channels = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    module.odd = torch.arange(10, dtype=torch.int8)[3:7]
    module.half = torch.randn(5, dtype=torch.bfloat16)
    module.wave = torch.randn(3, dtype=torch.complex64)
    module.point, module.nothing = torch.tensor(3.5), torch.empty(0, 4)
    names = ("q", "k", "v", "turned", "channels", "odd", "half", "wave", "point", "nothing")
    kept = {name: (getattr(module, name).clone(), getattr(module, name).stride(), getattr(module, name).dtype) for name in names}
    weights = Weights("s", [module], device)
    cycle(weights)
    for name, (value, stride, dtype) in kept.items():
        found: Any = getattr(module, name)
        assert (found.stride(), found.dtype) == (stride, dtype), name
        assert torch.equal(found, value), name
    assert module.q.untyped_storage()._cdata == module.v.untyped_storage()._cdata


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool]),
            st.lists(st.integers(0, 5), max_size=3),
            st.integers(0, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
    st.data(),
)
def test_any_tensors_come_back_to_the_byte(shapes: list[tuple[torch.dtype, list[int], int, bool]], data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder), 64 * MIB, "test")
        module = nn.Module()
        made: list[torch.Tensor] = []
        for number, (dtype, shape, offset, turned) in enumerate(shapes):
            size = max(1, int(torch.Size(shape).numel())) + offset
            base = torch.randint(0, 2, (size,)).to(dtype)
            tensor = base[offset : offset + torch.Size(shape).numel()].reshape(shape)
            tensor = tensor.mT if turned and len(shape) > 1 else tensor
            if made and data.draw(st.booleans()):
                tensor = made[data.draw(st.integers(0, len(made) - 1))]
            made.append(tensor)
            setattr(module, f"t{number}", tensor)
        kept = [(each.clone(), each.stride()) for each in made]
        weights = Weights("s", [module], CpuDevice(ledger), strict=True)
        cycle(weights, 2)
        for number, (value, stride) in enumerate(kept):
            found = getattr(module, f"t{number}")
            assert torch.equal(found, value)
            assert found.stride() == stride
        weights.close()
        ledger.close()


class Table:
    """No module, but it has weights."""

    __slots__ = ("here", "owner")

    def __init__(self, owner: Any) -> None:
        self.here, self.owner = torch.ones(4), owner


def test_tensors_are_found_wherever_an_object_holds_them(device: CpuDevice) -> None:
    deep: list[Any] = [torch.ones(1)]
    for _ in range(5_000):
        deep = [deep]
    module = nn.Linear(4, 4)
    scorer = SimpleNamespace(layers=[{"first": module}], tables={torch.ones(2)}, deep=deep, plain=torch.zeros(3))
    scorer.table = module.table = Table(scorer)
    module.weight.side = SimpleNamespace(scale=torch.ones(1))  # as quantised parameters have it
    weights = Weights("s", [scorer], device)
    assert {"layers[0]['first'].weight", "layers[0]['first'].weight.side.scale", "table.here", "tables[0]", "plain"} <= set(
        weights.names
    )
    assert len({id(slot.tensor) for slot in weights._layout.slots}) == 7
    with pytest.raises(Evicted):
        scorer.table.here.sum()
    cycle(weights)
    assert scorer.table.here.sum() == 4


def test_a_module_made_under_inference_mode_works(device: CpuDevice) -> None:
    x = torch.ones(1, 8)
    with torch.inference_mode():
        module = nn.Linear(8, 8)
        before = module(x)
    cycle(Weights("s", [module], device))
    with torch.inference_mode():
        assert torch.equal(module(x), before)


def test_writes_to_inference_tensors_are_written_back(device: CpuDevice) -> None:
    with torch.inference_mode():
        module = nn.Linear(8, 8)
    weights = Weights("s", [module], device, strict=True)
    weights.restore()
    with torch.inference_mode():
        module.weight.fill_(3)
    weights.evict()
    weights.restore()
    with torch.inference_mode():
        assert torch.equal(module.weight, torch.full((8, 8), 3.0))


def test_a_restore_draws_no_random_numbers(device: CpuDevice) -> None:
    weights = Weights("s", [nn.Linear(8, 8)], device)
    torch.manual_seed(1)
    first = torch.rand(1)
    torch.manual_seed(1)
    cycle(weights)
    assert torch.equal(torch.rand(1), first)


def test_a_cast_that_autocast_remembers_does_not_outlive_the_weights(device: CpuDevice) -> None:
    module = nn.Linear(8, 8)
    weights = Weights("s", [module], device)
    weights.restore()
    x = torch.ones(1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x)
        with torch.no_grad():
            module.weight.fill_(2)
            module.bias.fill_(0)
        weights.evict()
        weights.restore()
        assert module(x)[0, 0] == 16


# --- nothing that is gone is read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: m(x),
        lambda m, x: m[0](x),
        lambda m, x: functional.linear(x, m[0].weight),
        lambda m, x: functional.layer_norm(x, (8,), m[1].weight, m[1].bias),
        lambda m, x: x @ m[0].weight,
        lambda m, _: m[0].weight.sum(),
        lambda m, _: m[0].weight.clone(),
        lambda m, _: m[0].weight.numpy(),
        lambda m, _: m[0].weight[0, 0].item(),
        lambda m, _: m.state_dict(),
        lambda m, _: repr(m[0].weight),
        lambda m, _: m[2].table[0],
        lambda m, _: m.half(),
    ],
)
def test_any_use_of_evicted_weights_raises(use: Any, device: CpuDevice) -> None:
    table = nn.Module()
    table.table = torch.ones(4)
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), table)
    weights = Weights("judge", [module], device)
    for _ in range(2):
        with pytest.raises(Evicted, match="judge"):
            use(module, torch.ones(1, 8))
        weights.restore()
        weights.evict()
    weights.restore()
    module[0](torch.ones(1, 8))


def test_a_lease_needs_resident_weights_and_keeps_them(device: CpuDevice) -> None:
    module = nn.Linear(8, 8)
    weights = Weights("s", [module], device)
    with pytest.raises(Evicted), weights.lease():
        pass
    weights.restore()
    with weights.lease():
        with pytest.raises(Busy), weights.lease():
            weights.evict()
        assert weights.is_resident
        with pytest.raises(Busy):
            weights.close()
        module(torch.ones(1, 8))
    weights.evict()
    assert not weights.is_resident


def test_going_twice_and_coming_twice_is_once(device: CpuDevice, ledger: Ledger) -> None:
    weights = Weights("s", [nn.Linear(8, 8)], device)
    assert weights.evict().size == 0
    assert weights.restore().size == weights.size
    assert weights.restore().size == 0
    assert ledger.taken_bytes == weights.size
    weights.evict()
    assert weights.evict().size == 0
    assert ledger.taken_bytes == 0


def test_many_that_restore_at_once_restore_once(device: CpuDevice, ledger: Ledger) -> None:
    weights = Weights("s", [nn.Linear(512, 512)], device)
    moved: list[int] = []
    threads = [threading.Thread(target=lambda: moved.append(weights.restore().size)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(moved) == [0] * 7 + [weights.size]
    assert ledger.taken_bytes == weights.size


# --- failures leave them cleanly evicted ---------------------------------------------------------------------------------


def test_a_restore_without_room_leaves_them_evicted_and_works_later(device: CpuDevice, ledger: Ledger) -> None:
    module = nn.Linear(512, 512)
    weights = Weights("s", [module], device)
    ledger.reserve(64 * MIB)
    for _ in range(2):
        with pytest.raises(DeviceFull):
            weights.restore()
        assert not weights.is_resident
        with pytest.raises(Evicted):
            module(torch.ones(1, 512))
    ledger.release(64 * MIB)
    weights.restore()
    module(torch.ones(1, 512))
    assert ledger.taken_bytes == weights.size


@pytest.mark.parametrize("at", [0, -512])
def test_damage_of_what_is_kept_is_found_in_strict_mode(at: int, device: CpuDevice, ledger: Ledger) -> None:
    """Of a parameter, and of a buffer that was written before."""
    module = nn.BatchNorm1d(8)
    weights = Weights("s", [module], device, strict=True)
    weights.restore()
    with torch.no_grad():
        module(torch.randn(16, 8))
        module.weight.add_(1)
    weights.evict()
    weights.restore()
    weights.evict()
    weights._slab[at] += 1
    with pytest.raises(Broken, match="not what was kept"):
        weights.restore()
    assert ledger.taken_bytes == 0
    with pytest.raises(Broken):
        weights.restore()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(8, 8))),
        lambda m: m.load_state_dict({"weight": torch.zeros(8, 8), "bias": torch.zeros(8)}, assign=True),
        lambda m: m.half(),
        lambda m: m.register_buffer("adapter", torch.zeros(4)),
        lambda m: setattr(m, "adapter", torch.zeros(4)),
        lambda m: setattr(m.weight, "data", torch.zeros(8, 8)),
        lambda m: delattr(m, "bias"),
    ],
    ids=["parameter", "assigned", "cast", "buffer added", "attribute added", "data", "removed"],
)
def test_what_was_rebound_or_added_is_found_and_nothing_is_restored_over_it(
    change: Any, device: CpuDevice, ledger: Ledger
) -> None:
    module = nn.Linear(8, 8)
    weights = Weights("s", [module], device)
    weights.restore()
    change(module)
    with pytest.raises(Broken):
        weights.evict()
    assert ledger.taken_bytes == 0
    with pytest.raises(Broken):
        weights.restore()


def test_what_was_replaced_while_evicted_is_found_before_it_is_used(device: CpuDevice, ledger: Ledger) -> None:
    module = nn.Linear(8, 8)
    weights = Weights("s", [module], device)
    module.weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(Broken, match="weight was added, or put in the place"):
        weights.restore()
    assert ledger.taken_bytes == 0


def test_a_write_past_torchs_count_is_found_in_strict_mode(device: CpuDevice) -> None:
    module = nn.Linear(8, 8)
    weights = Weights("s", [module], device, strict=True)
    weights.restore()
    module.weight.data.fill_(3)
    with pytest.raises(Broken, match="past torch's count"):
        weights.evict()


def test_a_view_that_somebody_keeps_is_found_and_never_dangles(device: CpuDevice) -> None:
    module = nn.Linear(8, 8)
    weights = Weights("s", [module], device)
    weights.restore()
    kept = module.weight.detach()[0]
    seen = kept.clone()
    with pytest.raises(Broken, match="holds a view"):
        weights.evict()
    assert torch.equal(kept, seen)


class Faulty(CpuDevice):
    """Its copies and its pinning fail when told to; what it frees must be free."""

    is_faulty = False
    arena: Any = None
    is_pinned = False

    def allocate(self, size: int) -> torch.Tensor:
        found = super().allocate(size)
        self.arena = StorageWeakRef(found.untyped_storage())  # type: ignore[no-untyped-call]
        return found

    def free(self, size: int) -> None:
        assert self.arena.expired()
        super().free(size)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.is_faulty:
            raise RuntimeError("a fault")
        super().copy(target, source)

    def pin(self, slab: torch.Tensor) -> None:
        self.is_pinned = True
        if self.is_faulty:
            raise MemoryError("a fault")

    def unpin(self, slab: torch.Tensor) -> None:
        self.is_pinned = False


def test_a_fault_of_the_device_leaves_none_of_its_memory_taken(ledger: Ledger) -> None:
    device, module = Faulty(ledger), nn.BatchNorm1d(8)
    weights = Weights("s", [module], device)
    device.is_faulty = True
    with pytest.raises(RuntimeError, match="a fault"):
        weights.restore()
    assert ledger.taken_bytes == 0
    device.is_faulty = False
    weights.restore()
    device.is_faulty = True
    with pytest.raises(RuntimeError, match="a fault"):
        weights.evict()
    weights.close()
    assert ledger.taken_bytes == 0
    with pytest.raises(MemoryError, match="a fault"):
        Weights("s", [nn.Linear(8, 8)], device)
    assert not device.is_pinned


# --- what is refused -----------------------------------------------------------------------------------------------------


def test_meta_tensors_are_refused(device: CpuDevice) -> None:
    with pytest.raises(Refused, match="weight is a meta tensor"):
        Weights("s", [nn.Linear(8, 8, device="meta")], device)


def test_hooks_of_another_offloader_are_refused(device: CpuDevice) -> None:
    module = nn.Linear(8, 8)
    module._hf_hook = object()  # type: ignore[assignment]
    with pytest.raises(Refused, match="another offloader"):
        Weights("s", [module], device)


def test_a_live_graph_is_refused(device: CpuDevice) -> None:
    module = nn.Linear(8, 8)
    module.doubled = module.weight * 2
    with pytest.raises(Refused, match="doubled hangs on an autograd graph"):
        Weights("s", [module], device)


def test_what_has_no_one_storage_is_refused(device: CpuDevice) -> None:
    module = nn.Module()
    module.table = torch.eye(4).to_sparse()
    with pytest.raises(Refused, match="table"):
        Weights("s", [module], device)


class Wrapped(torch.Tensor):
    """As quantisers make them: it has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Wrapped(torch.ones(2)), "Wrapped"),
        (nn.parameter.UninitializedParameter(), "Uninitialized"),
        (torch.ones(2, dtype=torch.complex64).conj(), "lazily conjugated"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "lazily conjugated or negated"),
    ],
)
def test_tensors_whose_memory_is_not_what_they_say_are_refused(tensor: torch.Tensor, words: str, device: CpuDevice) -> None:
    with pytest.raises(Refused, match=f"table is .*{words}"):
        Weights("s", [SimpleNamespace(table=tensor)], device)


def test_two_storages_of_the_same_memory_are_refused(device: CpuDevice) -> None:
    memory = bytearray(64)
    module = nn.Module()
    module.one = torch.frombuffer(memory, dtype=torch.uint8)[:40]
    module.two = torch.frombuffer(memory, dtype=torch.uint8)[40:]
    Weights("s", [module], device).close()
    module.one = torch.frombuffer(memory, dtype=torch.uint8)[:40]
    module.two = torch.frombuffer(memory, dtype=torch.uint8)[39:]
    with pytest.raises(Refused, match="one and two share memory"):
        Weights("s", [module], device)


def test_what_holds_no_tensor_is_refused(device: CpuDevice) -> None:
    with pytest.raises(Refused, match="no tensor"):
        Weights("s", [object()], device)


# --- memory --------------------------------------------------------------------------------------------------------------


def rss_mib() -> float:
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def test_memory_is_given_back_by_eviction_and_close_and_does_not_grow(tmp_path: Path) -> None:
    size = 128
    ledger = Ledger(tmp_path / "device", 1024 * MIB, "test")
    module = nn.Module()
    for number in range(size):
        setattr(module, f"p{number}", nn.Parameter(torch.ones(MIB // 4)))
    weights = Weights("s", [module], CpuDevice(ledger))
    assert weights.size == size * MIB  # exact, and nothing is rounded up
    evicted = rss_mib()
    for _ in range(4):
        weights.restore()
        assert rss_mib() > evicted + 0.8 * size
        weights.evict()
        assert rss_mib() < evicted + 0.2 * size
    weights.close()
    assert rss_mib() < evicted - 0.8 * size
    ledger.close()


PEAK = """
import re, sys, torch
from pathlib import Path
from tangram.executors.gpu.device import CpuDevice
from tangram.executors.gpu.ledger import Ledger
from tangram.executors.gpu.weights import Weights

def mib(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

module = torch.nn.ParameterList(torch.ones(each << 18) for each in [1] * 64 + [32] * 6)
before = mib("VmRSS")
Weights("s", [module], CpuDevice(Ledger(Path(sys.argv[1]), 1 << 30, "test")))
print(mib("VmHWM") - before)
"""


def test_registration_takes_little_more_than_the_largest_storage_beside_the_weights(tmp_path: Path) -> None:
    """Of 256 MiB, in pieces of 1 and 32 MiB."""
    assert float(subprocess.check_output([sys.executable, "-c", PEAK, str(tmp_path / "device")])) < 32 + 32


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_hosts_budget_is_that_of_the_tightest_of_its_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc", meminfo="MemTotal: 1000 kB\nMemAvailable:  900 kB")
    assert host_budget_bytes(tmp_path) == 900 * 1024
    write(tmp_path / "proc" / "self", cgroup="1:cpu,memory:/job\n0::/../pod/box")
    pod = tmp_path / "sys" / "fs" / "cgroup" / "pod"
    write(pod / "box", memory__max="max", memory__current=1, memory__stat="inactive_file 1")
    assert host_budget_bytes(tmp_path) == 900 * 1024
    write(pod, memory__max=500_000, memory__current=400_000, memory__stat="file 9\ninactive_file 50000")
    assert host_budget_bytes(tmp_path) == 150_000
    write(pod / "box", memory__max=100_000, memory__current=30_000)
    assert host_budget_bytes(tmp_path) == 70_001
    old = {"memory__limit_in_bytes": 60_000, "memory__usage_in_bytes": 50_000, "memory__stat": "total_inactive_file 7"}
    write(tmp_path / "sys" / "fs" / "cgroup" / "memory" / "job", **old)
    assert host_budget_bytes(tmp_path) == 10_007


# --- the ledger ----------------------------------------------------------------------------------------------------------


def test_accounts_of_several_processes_share_a_device_and_a_dead_ones_is_free(tmp_path: Path) -> None:
    import os
    import signal

    folder = tmp_path / "device"
    mine = Ledger(folder, 100, "mine")
    mine.reserve(30)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        other = Ledger(folder, 100, "other")
        other.reserve(60)
        os.write(tell, b"x")
        signal.pause()
    os.read(ready, 1)
    assert mine.free_bytes() == 10
    with pytest.raises(DeviceFull):
        mine.reserve(11)
    assert mine.taken_bytes == 30
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert mine.free_bytes() == 70
    mine.reserve(70)
    mine.release(100)
    mine.close()
