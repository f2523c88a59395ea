# SPDX-License-Identifier: Apache-2.0
"""The C++ library of Tessera: plans that run on arrays of any library."""

from collections.abc import Callable, Sequence
from typing import Any

class Problem:
    """What is to be computed: an operation and the fields of the C++ Problem, by keyword.

    None leaves a field at its default, or at what other fields decide. Enumerations are the words of the problem's line
    ("vk", "mean"), a window is (left, right), a list (form, heads, per_batch, full), a source of keys a dict of layout,
    seqlen, total, page_size, pages and seqused. Fields are read as attributes. Hashable; pickled as its line.
    """

    def __init__(self, operation: str, **fields: Any) -> None:
        """operation: "attention", "combine", "kv_append", "linear_decode" or "linear_chunk".

        Raises ValueError naming the field, TypeError for a keyword that is none.
        """

    @staticmethod
    def fields() -> tuple[str, ...]:
        """Names of the fields."""

    @staticmethod
    def parse(line: str) -> Problem:
        """From a line (docs/grammar.md). Raises ValueError."""

    def __getattr__(self, name: str) -> Any: ...

class Plan:
    """How a problem is computed: made once, run many times, by many threads at once."""

    def __init__(
        self, problem: Problem | str, *, wishes: str = "", threads: int = 0, isa: str = "", device: int = -1
    ) -> None:
        """problem: a Problem or its line (docs/grammar.md). threads: worker threads, 0 for as many as OpenMP would use.
        isa: one of cpu_isas(), "" for the best. device: index of a GPU, −1 for the CPU.

        Raises ValueError for a line or wish that is wrong, NotImplementedError if nothing computes it.
        """

    @property
    def problem(self) -> str:
        """The problem's line in its shortest form."""

    @property
    def implementation(self) -> str:
        """Name of the implementation chosen, "cpu.tiled"."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a run needs besides its arrays."""

    @property
    def threads(self) -> int:
        """Worker threads."""

    @property
    def isa(self) -> str:
        """Instruction set."""

    def explain(self) -> str:
        """Lines of text: problem, target, what was chosen, and why every other implementation was refused."""

    def run(
        self,
        slots: tuple[str, ...],
        arrays: Sequence[Any],
        seed: int = 0,
        offset: int = 0,
        batch_offset: int = 0,
        head_offset: int = 0,
        score: Callable[[float, int, int, int, int], float] | None = None,
        mask: Callable[[int, int, int, int], bool] | None = None,
        stream: int = 0,
        workspace: Any = None,
        wait: bool = False,
    ) -> None:
        """Binds arrays[i] (None: nothing) to the slot named slots[i] and computes.

        Outputs are written in place, nothing is copied; partial results may be a tuple of arrays. The interpreter lock
        is released, unless score or mask is a Python function (cpu.reference only).

        On a GPU: queued on `stream`, a CUstream (0: the legacy default), in `workspace`, an array of at least
        workspace_bytes there (None: memory allocated for this run); wait: returns when it is done.

        Raises ValueError, TypeError for what is no array, NotImplementedError for a function that cannot be called.
        """

class Buffer:
    """Uninitialised memory of a shape and dtype ("bf16"), 64-byte aligned, for from_dlpack to take.

    On the CPU or on the GPU `device`. What was written to it must be complete when it is taken: no stream is waited
    for.
    """

    def __init__(self, shape: Sequence[int], dtype: str, device: int = -1) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """Tessera's name of the dtype."""

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def version() -> str:
    """The library's version, "0.1.0"."""

def build_info() -> str:
    """Version, compiler, build type, instruction sets, OpenMP and Highway, one a line."""

def cpu_isas() -> list[str]:
    """Instruction sets that this build has and this machine can run, best first."""

def builtin_scores() -> list[str]:
    """Names that score= knows."""

def builtin_masks() -> list[str]:
    """Names that mask= knows."""

def register_score(
    name: str,
    text: str,
    extras: Sequence[tuple[str, str, int]],
    derivative_text: str | None,
    program: str = ...,
) -> None:
    """Names a score by its C++ text; extras: (name, dtype, dimensions) of each tensor that it reads; program: for the
    CPU.

    Raises ValueError for a name, texts or extras that cannot be.
    """

def register_mask(name: str, text: str, extras: Sequence[tuple[str, str, int]], program: str = ...) -> None:
    """Names a mask, likewise."""

def classify_mask(
    name: str,
    arrays: list[Any],
    queries: int,
    keys: int,
    block: tuple[int, int],
    q_offset: int,
    out: Any,
) -> None:
    """What a traced mask says of each tile, into out: 0 hides all of it, 1 some, 2 nothing."""

def is_registered(kind: str, name: str) -> bool:
    """Whether a "score" or "mask" has the name."""

def set_threads(threads: int) -> None:
    """Worker threads of calls that do not say; 0: as many as OpenMP would use."""

def get_threads() -> int:
    """That number, or what OpenMP would use."""

def default_threads() -> int:
    """Threads that OpenMP would use for the calling thread's work."""

def skip_thresholds(
    problem: Problem | str,
    steps: int,
    warm_up: int,
    ramp: tuple[float, float],
    heads: Sequence[tuple[int, float, float]],
) -> list[float]:
    """Thresholds of every step and query head in powers of two, one after another. heads: (head, first, last)."""

def skip_blocks(problem: Problem | str, ranges: Sequence[tuple[int, int]], name: str) -> list[int]:
    """Words of the key blocks that lie in the ranges whole; `name` is for errors."""

class TorchRun:
    """A plan's run on torch tensors, which makes its outputs."""

    def __init__(
        self,
        plan: Plan,
        inputs: Sequence[str | None],
        outputs: Sequence[tuple[str, int | tuple[tuple[int, ...], tuple[int, ...], Any]]],
        prepare: Sequence[Callable[[Any], Any] | None] = (),
    ) -> None:
        """inputs: slots of the tensors that a run gets, None for one that is not bound. outputs: (slot, index of the
        input that it is like) or (slot, (shape, strides, dtype)). prepare: for the first inputs, a function to the
        tensor to bind in place of one whose elements do not lie packed from a multiple of 16 bytes on, or None.
        """

    def run(self, tensors: tuple[Any, ...], scalars: tuple[int, ...]) -> list[Any]:
        """The outputs. scalars: dropout's seed and offset, batch_offset, head_offset.

        On a GPU the run is queued on the current stream, in a workspace of torch's allocator.
        """

    def __call__(self, *tensors: Any) -> Any:
        """The output of a run with these tensors, all scalars 0, or a tuple of several."""

    def with_scalars(self, scalars: tuple[int, ...], *tensors: Any) -> Any:
        """The same with scalars."""

class KeptCalls:
    """A table of calls that were made before and of what computes them."""

    def call(self, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Any:
        """The result of a call that is kept, None for any other."""

    def find(self, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> TorchRun | Callable[..., Any] | None:
        """What computes a call that is kept, None for any other."""

    def keep(self, q: Any, k: Any, v: Any, options: tuple[Any, ...], computes: TorchRun | Callable[..., Any]) -> None:
        """Nothing is kept for options other than None, bool, int, float, str and tuples of such, nor where somebody
        wants to see the call.
        """

    def clear(self) -> None: ...
    def __len__(self) -> int: ...

def set_keys_without_modes(pairs: list[tuple[int, int]]) -> None:
    """The dispatch keys that a thread without modes includes and excludes: (included, excluded) of each kind."""

def explain_for(problem: Problem | str, target: str, multiprocessors: int = 0, wishes: str = "") -> str:
    """Plan.explain for a GPU that need not be there: target is "sm_120f", multiprocessors 0 for an unknown number."""

def free_workspaces() -> None:
    """Frees the workspaces kept for later runs (at most 256 MiB)."""

def is_capturing(device: int, stream: int) -> bool:
    """Whether a CUstream (0: the legacy default) of a GPU is being captured into a graph.

    Also if it does not tell, because another one is captured that waits for it.
    """

def stream_id(device: int, stream: int) -> int | None:
    """What no other stream of the process ever has, unlike its handle; None where the driver does not tell."""

def longest_step(boundaries: Any, name: str = "boundaries") -> int:
    """The largest difference of neighbours in int32 (n), 0 for fewer than two entries; `name` is for errors."""

def violation_of(status: int) -> tuple[str, int] | None:
    """(slot, sequence) of a status word, None for 0."""

def parts_fit(parts: tuple[Any, ...], name: str = "parts", device: int = -1, stream: int = 0) -> bool:
    """Whether arrays are the parts of one strided tensor: same shape, dtype and strides, at even distances.

    device: where they are, −1 for the CPU; stream: where they will be used.

    Raises ValueError for shapes or dtypes that differ.
    """

def dropout_keep(
    out: Any,
    dropout: float,
    seed: int,
    offset: int = 0,
    batch: int = 0,
    head: int = 0,
    heads: int | None = None,
    q_offset: int | None = None,
    k_offset: int = 0,
) -> None:
    """Writes which probabilities dropout keeps into out, bool (batch, heads, seqlen_q, seqlen_k) or without batch.

    batch, head: positions of the first; heads: of the whole problem (default: out's); q_offset: default
    seqlen_k − seqlen_q.
    """

def ffi_handlers() -> tuple[Any, Any]:
    """(for CPUs, for CUDA): functions for jax.ffi.register_ffi_target, which run a plan on XLA's buffers.

    Attributes: problem, wishes, inputs, outputs (texts; slots separated by spaces, `-` for what is not bound,
    `slot:int64` for uint32 words), scalars (int64: seed, offset, batch_offset, head_offset, threads).
    """
