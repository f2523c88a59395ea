# SPDX-License-Identifier: Apache-2.0
"""Plans that are made once and run many times, and what a plan says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core
from ._arguments import parse
from ._execute import Route, Shapes, forward_route, get_threads, shapes_of
from ._gpu import KeptWorkspaces, run_on_gpu
from ._libraries import CPU, common_library, device_of, dtype_name, library_of_type, refuse_gradient
from ._problem import FORWARD, forward_outputs, problem_for
from .attention import answer
from .values import KeySource, arrays_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arguments import AttentionOptions

Array = Any

# Arguments whose slot has another name.
_SLOTS = {"sinks": "sink", "seed": "dropout_seed", "offset": "dropout_offset"}
_SCALARS = ("seed", "offset", "batch_offset", "head_offset")


def _place(device: int) -> str:
    return "cpu" if device == CPU else f"cuda:{device}"


class AttentionPlan:
    """A forward that was planned for the shapes, dtypes and device of some arrays, to be run on others like them.

    Several threads may run one plan at once. On a GPU it keeps its workspace between runs. Made by `tessera.plan`.
    `copy` and `pickle` take the arguments, the arrays among them, and plan anew.
    """

    def __init__(self, q: Array, k: Array | KeySource, v: Array | None, options: dict[str, Any]) -> None:
        self._call = parse(q, k, v, **options)
        k, v = arrays_of(k, v)
        named = (("q", q), ("k", k), ("v", v), *zip(self._call.slots, self._call.tensors, strict=True))
        self._array = type(q)
        self._library = common_library(named)
        self._device = self._library.device(q)
        self._workspaces = KeptWorkspaces()  # on the GPU
        tensors = tuple(tuple(tensor.shape) for tensor in self._call.tensors)
        self._planned_for = (
            Shapes(self._call.slots, self._call.sizes, tuple(q.shape), tuple(k.shape), tuple(v.shape), tensors),
            (q.dtype, k.dtype, v.dtype),
            None,
            get_threads() if self._device == CPU else 0,
            self._device,
        )
        self._route = self._found_route()

    def _found_route(self) -> Route:
        return forward_route(self._call.features, *self._planned_for)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "call": self._call,
            "planned_for": self._planned_for,
            "array": self._array,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._call = state["call"]
        self._planned_for, self._array = state["planned_for"], state["array"]
        self._library = library_of_type(self._array)
        self._device = self._planned_for[-1]
        self._workspaces = KeptWorkspaces()
        self._route = self._found_route()

    @property
    def problem(self) -> str:
        """The problem's line (docs/grammar.md)."""
        return self._route.plan.problem

    @property
    def implementation(self) -> str:
        """Name of the implementation chosen."""
        return self._route.plan.implementation

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a run needs besides its arrays."""
        return self._route.plan.workspace_bytes

    def explain(self) -> str:
        """Lines of text: the problem, what was chosen and why every other implementation was refused."""
        return self._route.plan.explain()

    def __repr__(self) -> str:
        return repr(self._route.plan)

    def __call__(self, q: Array, k: Array, v: Array, *, out: Array | None = None, **tensors: Any) -> Any:
        """As `attention` returns, for arrays of the planned shapes and dtypes.

        `tensors` replaces arrays of the plan by the names that errors have for them (`seqused_k=…`, `page_table=…`,
        `k2=…`, `q_offset=…`), and seed, offset, batch_offset or head_offset; those not named are taken as they were
        given to `tessera.plan`. For a `KeySource` k and v are its arrays. torch tensors must not
        require grad. Raises ValueError for another shape or dtype than planned, TypeError for a keyword that is no such
        argument.
        """
        results = self.run(q, k, v, out=out, **tensors)
        if len(results) == 1:
            return results[0]
        return answer(self._call, results)

    def run(self, q: Array, k: Array, v: Array, *, out: Array | None = None, **tensors: Any) -> tuple[Array, ...]:
        """As a call, with every output as a plain array: out, lse, mass, next counts and indices or bits."""
        if self._library.operators is not None:
            refuse_gradient("a plan", "has no gradient; use attention, detach() or no_grad()", q=q, k=k, v=v)
        device = device_of(q)
        if device != self._device:
            raise ValueError(f"q: got an array on {_place(device)}; want one on {_place(self._device)}, as was planned")
        bound, scalars = self._bound(tensors)
        route = self._route
        made = route.made[out is not None :]
        outputs = [self._library.empty(shape, dtype, q) for shape, dtype in made]
        if route.taken is not None:
            bound = [bound[i] for i in route.taken]
        written = outputs if out is None else [out, *outputs]
        arrays, callables = (q, k, v, *bound, *written), self._call.callables
        if device == CPU:
            route.run(route.slots, arrays, *scalars, *callables)
        else:
            run_on_gpu(self._library, route.plan, route.slots, arrays, q, scalars, callables, self._workspaces)
        finished = [self._library.finish(array, q) for array in outputs]
        return tuple(finished if out is None else [out, *finished])

    def _bound(self, changes: dict[str, Any]) -> tuple[list[Array], list[int]]:
        tensors, scalars = list(self._call.tensors), list(self._call.scalars)
        for name, value in changes.items():
            slot = _SLOTS.get(name, name)
            if slot in self._call.slots:
                tensors[self._call.slots.index(slot)] = value
            elif name in _SCALARS and not hasattr(value, "shape"):
                scalars[_SCALARS.index(name)] = int(value)
            else:
                raise TypeError(
                    f"{name}: got an argument that the plan does not bind; want one of "
                    f"{', '.join((*self._call.slots, *_SCALARS))}"
                )
        return tensors, scalars


def plan(q: Array, k: Array | KeySource, v: Array | None = None, **options: Unpack[AttentionOptions]) -> AttentionPlan:
    """Plans `attention(q, k, v, **options)` for the shapes and dtypes of these arrays, without computing it.

    Raises what `attention` raises before it reads data.
    """
    return AttentionPlan(q, k, v, dict(options))


def explain(
    q: Array | str,
    k: Array | KeySource | None = None,
    v: Array | None = None,
    *,
    target: str | None = None,
    multiprocessors: int = 0,
    **options: Unpack[AttentionOptions],
) -> str:
    """What Tessera does with a call, or with a problem given as its line: `explain("attention sq=4096 hq=32 causal")`.

    Several lines: the problem, the target, the implementation with its tiles, splits, threads and workspace, and for
    every implementation refused, why. Of a line's options only `wishes` and `threads` are read.

    target: a GPU that need not be there, as "sm_80", "sm_89", "sm_90a" or "sm_120f", with so many multiprocessors; 0:
    they are not known, and nothing is split among them. None: where the arrays are, or the CPU. Raises ValueError for
    another name, NotImplementedError if nothing computes the problem there.
    """
    if target is None and multiprocessors != 0:
        raise TypeError(f"multiprocessors: got {multiprocessors} without target; want a target beside it")
    if isinstance(q, str):
        other = set(options) - {"wishes", "threads"}
        if other or k is not None or v is not None:
            raise TypeError(
                f"explain: got a line and {', '.join(sorted(other)) or 'arrays'}; want wishes and threads only"
            )
        problem, wishes = _core.Problem.parse(q), options.get("wishes", "")
        if target is None:
            return _core.Plan(problem, wishes=wishes, threads=options.get("threads", 0) or get_threads()).explain()
    elif target is None:
        return AttentionPlan(q, k, v, dict(options)).explain()
    else:
        problem, wishes = _problem_of(q, k, v, dict(options))
    return _core.explain_for(problem, target, multiprocessors, wishes)


def _problem_of(q: Array, k: Any, v: Array | None, options: dict[str, Any]) -> tuple[_core.Problem, str]:
    """The problem and the wishes of a forward, without a plan: the arrays' own device need not have one."""
    call = parse(q, k, v, **options)
    k, v = arrays_of(k, v)
    shapes = shapes_of(call, q, k, v)
    dtypes = (dtype_name(q.dtype, "q"), dtype_name(k.dtype, "k"), dtype_name(v.dtype, "v"))
    out = forward_outputs(call.features, shapes, dtypes[0])[0]
    return problem_for(FORWARD, call.features, shapes, (*dtypes, out[2])), call.features.wishes
