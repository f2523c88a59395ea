# SPDX-License-Identifier: Apache-2.0
"""Lists of tiles that live across the steps of a diffusion run (docs/skip-state.md)."""

from __future__ import annotations

from array import array as host_array
from copy import copy
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

from . import _core
from ._arguments import Call, parse
from ._checks import pair, real, whole
from ._execute import forward_route, get_threads, shapes_of
from ._features import BLOCK, with_skip
from ._gpu import KeptWorkspaces, run_on_gpu
from ._libraries import CPU, dtype_name, host_library, library_of, library_of_type, refuse_gradient
from ._problem import sizes_of
from .attention import answer
from .tiles import TileList
from .values import KeySource, arrays_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from typing_extensions import Unpack

    from ._arguments import AttentionOptions

Array = Any
Rule = Literal["mass", "threshold"]
Range = tuple[int, int]

_MAGIC = "tessera skip state 1"
_RAMPS = {"mass": (0.002, 0.012), "threshold": (-5.0, -5.0)}


class SkipState:
    """One layer's list of tiles for one stream of calls, with what makes the next step's of it.

    A call computes `attention` of the tiles that the state lists, and moves the state on:

        state = SkipState(batch=1, seqlen_q=8192, seqlen_k=8192, heads_q=24, steps=50)
        for step in range(50):
            out = state(q, k, v, step=step)

    Conditional and unconditional calls want a state each. Rules (docs/skip-state.md has the equations):

    - `mass`: a tile is kept while the root mean square over its rows of their probability mass there is above the
      step's threshold; memory of a tile left out grows by `growth` eighths of an octave a step, so that it comes back.
    - `threshold`: LiteAttention's (arXiv:2511.11062): a tile is kept if a score there beats its row's maximum over the
      tiles before it by 2^threshold, in alternating directions; what is left out never comes back.

    ramp: thresholds of the first and the last step: masses above 0 and below 4, in geometric progression, default
    (0.002, 0.012); or powers of two from −100 to 0, in arithmetic progression, default (−5, −5). heads: those of single
    query heads, {head: (first, last)}. warm_up: first steps, which keep every tile. own_lse: masses are normalised by
    the step's own LSE instead of the step's before, as calibration wants them. layer: a name that files carry. total_q:
    tokens of packed queries, whose longest sequence has seqlen_q: say it by max_seqlen_q, and max_seqlen_k for keys.

    The state is allocated here, in NumPy's memory, or, given an array `like` of torch or cupy on a GPU, in memory of
    that library there; without NumPy, in torch's beside a tensor `like`. A step adds nothing to it and does not wait
    for a GPU; what it is told lies there too, for every step, so that steps may be captured into a CUDA graph, each
    with its own number. Raises ValueError for options out of range, ImportError where neither memory is there.
    """

    def __init__(
        self,
        *,
        seqlen_q: int,
        seqlen_k: int,
        heads_q: int,
        batch: int = 1,
        total_q: int | None = None,
        rule: Rule = "mass",
        block: tuple[int, int] = (128, 128),
        steps: int = 50,
        warm_up: int = 2,
        ramp: tuple[float, float] | None = None,
        heads: Mapping[int, tuple[float, float]] | None = None,
        growth: int = 1,
        own_lse: bool = False,
        layer: str = "",
        like: Array | None = None,
    ) -> None:
        self._place(like)
        if rule not in _RAMPS:
            raise ValueError(f"rule: got {rule!r}; want 'mass' or 'threshold'")
        if not isinstance(layer, str) or "\n" in layer:
            raise ValueError(f"layer: got {layer!r}; want a name of one line")
        block_q, block_kv = pair("block", block, BLOCK)
        self.block = (whole("block", block_q), whole("block", block_kv))
        self.rule, self.steps, self.layer = rule, whole("steps", steps), layer
        self._skip = (rule, bool(own_lse), whole("growth", growth))
        first, last = _RAMPS[rule] if ramp is None else pair("ramp", ramp, "(first, last)")
        self._ramp = (real("ramp", first), real("ramp", last))
        self._warm_up = whole("warm_up", warm_up)
        self._heads: list[tuple[int, float, float]] = []
        for head, ends in (heads or {}).items():
            first, last = pair("heads", ends, "{head: (first, last)}")
            self._heads.append((whole("heads", head), real("heads", first), real("heads", last)))
        self._must: dict[str, host_array[int]] = {}
        self.reshape(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, batch=batch, total_q=total_q)

    def _place(self, like: Array | None) -> None:
        """Where arrays lie: beside `like`, if that is on a GPU."""
        library = None if like is None else library_of(like, "like")
        self._device = CPU if library is None else library.device(like)
        if library is not None and self._device != CPU and library.name not in ("torch", "cupy"):
            raise ValueError(f"like: got an array of {library.name} on a GPU; want one of torch or cupy")
        self._library = host_library(library) if library is None or self._device == CPU else library
        # An array of one element says where, whatever becomes of the given one.
        self._like = None if self._library.name == "numpy" else self._library.empty((1,), "uint8", like)
        self._workspaces = KeptWorkspaces()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_library": None, "_workspaces": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._library = host_library(None) if self._like is None else library_of(self._like, "like")
        self._workspaces = KeptWorkspaces()

    def _placed(self, values: host_array[Any], shape: tuple[int, ...], dtype: str) -> Array:
        return self._library.from_bytes(values.tobytes(), shape, dtype, self._like)

    def _placed_words(self, words: host_array[int]) -> Array:
        return self._placed(words, (len(words),), "uint32")

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self._library.empty(shape, dtype, self._like)

    def reshape(
        self, *, seqlen_q: int, seqlen_k: int, heads_q: int, batch: int = 1, total_q: int | None = None
    ) -> None:
        """Begins anew for another shape, with the same options; the ranges are dropped, because tokens are others."""
        packed = {} if total_q is None else {"q_layout": "varlen", "total_q": whole("total_q", total_q)}
        problem = _core.Problem(
            "attention",
            batch=whole("batch", batch),
            seqlen_q=whole("seqlen_q", seqlen_q),
            heads_q=whole("heads_q", heads_q),
            kv={"layout": "dense", "seqlen": whole("seqlen_k", seqlen_k)},
            block_q=self.block[0],
            block_kv=self.block[1],
            list=("bitmask", "q", True, False),
            skip=self._skip,
            **packed,
        )
        thresholds = _core.skip_thresholds(problem, self.steps, self._warm_up, self._ramp, self._heads)
        self._problem = problem
        self._thresholds = self._placed(host_array("f", thresholds), (self.steps, problem.heads_q), "fp32")
        self._steps = self._placed(host_array("i", range(self.steps)), (self.steps, 1), "int32")
        self._blocks = -(-problem.seqlen_q // self.block[0]), -(-problem.kv["seqlen"] // self.block[1])
        rows = (problem.batch, problem.heads_q, self._blocks[0])
        words = -(-self._blocks[1] // 32)
        self._arrays: dict[str, Any] = {"tile_bits": self._empty((*rows, words), "uint32")}
        if self.rule == "mass":
            lse: tuple[int, ...] = (problem.batch, problem.heads_q, problem.seqlen_q)
            if total_q is not None:
                lse = (problem.heads_q, problem.total_q)
            self._arrays["skip_memory"] = self._empty((*rows, self._blocks[1]), "uint8")
            self._arrays["skip_lse"] = self._empty(lse, "fp32")
        every = host_array("I", [0xFFFFFFFF]) * words
        if self._blocks[1] % 32:
            every[-1] = (1 << self._blocks[1] % 32) - 1
        self._every = self._placed_words(every)
        self._must = {}
        self._placed_must: dict[str, Any] = {}
        self.reset()

    def reset(self) -> None:
        """Begins anew: every tile is listed and no LSE is known. The ranges stay."""
        self._arrays["tile_bits"][...] = self._every
        if self.rule == "mass":
            self._arrays["skip_memory"][...] = 255
            self._arrays["skip_lse"][...] = -float("inf")
        self._next_step: int | None = 0

    @property
    def device(self) -> int | None:
        """Index of the GPU where the state lies; None on the CPU."""
        return None if self._device == CPU else self._device

    def to(self, like: Array) -> SkipState:
        """The same state in the memory of `like`: NumPy's for arrays on the CPU. Its ranges come with it."""
        moved = copy(self)
        moved._place(like)
        shape = self._problem
        moved.reshape(
            seqlen_q=shape.seqlen_q,
            seqlen_k=shape.kv["seqlen"],
            heads_q=shape.heads_q,
            batch=shape.batch,
            total_q=shape.total_q if shape.q_layout == "varlen" else None,
        )
        if self._next_step is not None:
            moved.from_bytes(self.to_bytes())
        moved._must = dict(self._must)
        moved._placed_must = {name: moved._placed_words(each) for name, each in self._must.items()}
        return moved

    @property
    def next_step(self) -> int | None:
        """The least step that a call takes, besides 0; None after a run that ended early, which leaves no state."""
        return self._next_step

    def set_ranges(self, must_do: Sequence[Range] = (), must_skip: Sequence[Range] = ()) -> None:
        """Key tokens [begin, end) that steps compute, or leave out, from now on; rounded inward to tiles.

        Raises ValueError for a range outside the keys or without a whole tile, for a tile in both, and if no tile is
        left. The state stays as it was then.
        """
        words = {}
        for name, ranges in (("must_do", must_do), ("must_skip", must_skip)):
            ends = [pair(name, each, "(begin, end)") for each in ranges]
            tokens = [(whole(name, begin), whole(name, end)) for begin, end in ends]
            words[f"{name}_bits"] = host_array("I", _core.skip_blocks(self._problem, tokens, name))
        done, skipped = words["must_do_bits"], words["must_skip_bits"]
        if any(one & other for one, other in zip(done, skipped, strict=True)):
            raise ValueError("must_skip: got tokens of a tile that must_do has too; want ranges apart from those")
        if self._blocks[1] and sum(each.bit_count() for each in skipped) == self._blocks[1]:
            raise ValueError("must_skip: got every tile; want a tile that is left")
        self._must = words
        for name, each in words.items():
            if name in self._placed_must:  # in place, where a captured graph finds it
                self._placed_must[name][...] = self._placed_words(each)
            else:
                self._placed_must[name] = self._placed_words(each)

    def _listed(self) -> bytes:
        """The words of what the next step computes."""
        bits = self._library.to_bytes(self._arrays["tile_bits"])
        if not self._must or not bits:
            return bits
        done, skipped = (
            int.from_bytes(words.tobytes() * (len(bits) // len(words.tobytes())), "little")
            for words in (self._must["must_do_bits"], self._must["must_skip_bits"])
        )
        return ((int.from_bytes(bits, "little") | done) & ~skipped).to_bytes(len(bits), "little")

    def tile_list(self, like: Array | None = None) -> TileList:
        """What the next step computes, as a list of its own: for a backward of that step, or another call. Its array is
        of the library of `like`, default NumPy's. Waits for a GPU.
        """
        library = library_of_type(type(like)) or host_library(self._library)
        bits = library.from_bytes(self._listed(), tuple(self._arrays["tile_bits"].shape), "uint32", like)
        return TileList(bits=bits, form="bitmask", block=self.block)

    @property
    def active(self) -> float:
        """Share of the tiles that the next step computes, 0 to 1. Waits for a GPU."""
        tiles = self._problem.batch * self._problem.heads_q * self._blocks[0] * self._blocks[1]
        return int.from_bytes(self._listed(), "little").bit_count() / tiles if tiles else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of list, masses and LSE."""
        return sum(int(array.nbytes) for array in self._arrays.values())

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {array.nbytes / 1e6:.2f} MB" for name, array in self._arrays.items())
        of = f" of {self.layer!r}" if self.layer else ""
        return f"<SkipState{of}: {parts}; next step {self._next_step} of {self.steps}; {self._problem}>"

    def __call__(
        self, q: Array, k: Array | KeySource, v: Array | None = None, *, step: int, **options: Unpack[AttentionOptions]
    ) -> Any:
        """`attention(q, k, v, **options)` of the listed tiles, in step `step` of the run; returns what that does.

        Step 0 begins anew, others must come after the last one. `tiles` is the state's own. There is no gradient: a
        backward wants `attention(…, tiles=state.tile_list())` in place of the call.

        Raises ValueError for another shape than the state's and for a step that goes back or is beyond the run; the
        state stays as it was, but for step 0. A run that is interrupted leaves none: step 0, `reset` or `load` is due.
        """
        number = whole("step", step)
        if not 0 <= number < self.steps:
            raise ValueError(f"step: got {number}; want 0 to below the run's {self.steps} steps")
        if number and (self._next_step is None or number < self._next_step):
            last = "a run that ended early" if self._next_step is None else f"step {self._next_step - 1}"
            raise ValueError(f"step: got {number} after {last}; want a later one, or 0 to begin anew")
        if "tiles" in options:
            raise TypeError("tiles: got an argument; want none, the state has the list")
        call = parse(q, k, v, **options)
        k, v = arrays_of(k, v)
        refuse_gradient("SkipState", "has no gradient; use detach() or no_grad()", q=q, k=k, v=v)
        self._check_shape(call, q, k, v)
        results = self._run(self._bound(call, number), number, q, k, v)
        return results[0] if len(results) == 1 else answer(call, results)

    def _check_shape(self, call: Call, q: Array, k: Array, v: Array) -> None:
        """As many keys as the state's may lie in as many tiles: arrays do not show it."""
        sizes = sizes_of(shapes_of(call, q, k, v))
        if sizes.seqlen_k2 is not None:
            raise ValueError("k2: got a second source of keys; want one, states in Python have no other")
        own = self._problem
        for name, got, want in (
            ("batch", sizes.batch, own.batch),
            ("seqlen_q", sizes.seqlen_q, own.seqlen_q),
            ("seqlen_k", sizes.seqlen_k, own.kv["seqlen"]),
            ("heads_q", sizes.heads_q, own.heads_q),
        ):
            if got != want:
                raise ValueError(f"{name}: got {got}; want {want}, of which the state is")

    def _bound(self, call: Call, step: int) -> Call:
        must = self._placed_must if self._must else {}
        told = {**self._arrays, **must, "skip_threshold": self._thresholds[step]}
        if self.rule == "threshold":
            told["skip_step"] = self._steps[step]
        features = with_skip(call.features, self.block, self._skip)
        return call._replace(features=features, slots=(*call.slots, *told), tensors=(*call.tensors, *told.values()))

    def _run(self, call: Call, step: int, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        library = library_of(q, "q")
        device = library.device(q)
        if device != self._device:
            places = {True: "the CPU", False: f"GPU {device}"}, {True: "the CPU", False: f"GPU {self._device}"}
            got, want = (place[at == CPU] for place, at in zip(places, (device, self._device), strict=True))
            raise ValueError(f"q: got an array on {got}; want one on {want}, where the state is")
        dtypes = (q.dtype, k.dtype, v.dtype)
        threads = get_threads() if device == CPU else 0
        route = forward_route(call.features, shapes_of(call, q, k, v), dtypes, None, threads, device)
        outputs = [library.empty(shape, dtype, q) for shape, dtype in route.made]
        tensors = call.tensors if route.taken is None else tuple(call.tensors[i] for i in route.taken)
        before = self._next_step
        if step == 0:
            self.reset()
        self._next_step = None  # until the run has ended
        try:
            arrays = (q, k, v, *tensors, *outputs)
            if device == CPU:
                route.run(route.slots, arrays, *call.scalars, *call.callables)
            else:
                scalars, callables = call.scalars, call.callables
                run_on_gpu(library, route.plan, route.slots, arrays, q, scalars, callables, self._workspaces)
        except (ValueError, TypeError, NotImplementedError):  # before anything is written
            self._next_step = before if step else 0
            raise
        self._next_step = step + 1
        return tuple(library.finish(array, q) for array in outputs)

    def to_bytes(self) -> bytes:
        """Four lines (a name, the shape as a problem's line, the layer, the next step), then list, masses and LSE.

        Ranges and options are not in it. Raises ValueError after a run that ended early.
        """
        if self._next_step is None:
            raise ValueError("state: got one after a run that ended early; want reset() first")
        lines = f"{self._header()}{self._next_step}\n".encode()
        return lines + b"".join(self._library.to_bytes(array) for array in self._arrays.values())

    def _header(self) -> str:
        return f"{_MAGIC}\n{self._problem}\n{self.layer}\n"

    def from_bytes(self, saved: bytes) -> None:
        """What `to_bytes` gave. Raises ValueError for other bytes, or those of another shape, rule or layer; the state
        stays as it was then.
        """
        lines = saved.split(b"\n", 4)
        if len(lines) != 5:
            raise ValueError(f"saved: got {len(saved)} bytes without a state's lines; want what to_bytes gave")
        names = ("saved", "problem", "layer")
        for name, got, want in zip(names, lines[:3], self._header().encode().split(b"\n"), strict=False):
            if got != want:
                raise ValueError(f"{name}: got {got.decode(errors='replace')!r}; want {want.decode()!r}")
        if not lines[3].isdigit() or int(lines[3]) > self.steps:
            raise ValueError(f"step: got {lines[3].decode(errors='replace')!r}; want 0 to {self.steps}")
        if len(lines[4]) != self.nbytes:
            raise ValueError(f"saved: got {len(lines[4])} bytes of arrays; want {self.nbytes}")
        # The first array is the list. Rows end with a word that may have bits behind the last key block.
        bits = self._arrays["tile_bits"]
        if bits.nbytes and self._blocks[1] % 32:
            words = host_array("I", lines[4][: bits.nbytes])
            last = reduce(or_, words[bits.shape[-1] - 1 :: bits.shape[-1]])
            if last >> self._blocks[1] % 32:
                block = self._blocks[1] // 32 * 32 + last.bit_length() - 1
                raise ValueError(f"saved: got a list with key block {block}; want key blocks below {self._blocks[1]}")
        at = 0
        for array in self._arrays.values():
            part = lines[4][at : at + array.nbytes]
            array[...] = self._library.from_bytes(part, tuple(array.shape), dtype_name(array.dtype), self._like)
            at += array.nbytes
        self._next_step = int(lines[3])

    def save(self, path: str | os.PathLike[str]) -> None:
        """`to_bytes` into a file."""
        saved = self.to_bytes()  # before there is a file
        with open(path, "wb") as file:
            file.write(saved)

    def load(self, path: str | os.PathLike[str]) -> None:
        """`from_bytes` of a file."""
        with open(path, "rb") as file:
            self.from_bytes(file.read())
