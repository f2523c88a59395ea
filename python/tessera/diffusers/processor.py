# SPDX-License-Identifier: Apache-2.0
"""Attention processors around those of diffusers, and the streams and steps of their calls."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from diffusers.hooks.hooks import BaseState, HookRegistry, ModelHook, StateManager
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..attention import attention
from ..calibration import SkipThresholds
from ..torch import SkipAttention

Range = tuple[int, int]

_SDPA = torch.nn.functional.scaled_dot_product_attention
_HOOK = "tessera_skip"


class TesseraProcessor:
    """An attention processor around a layer's own: that projects, normalises and rotates as it does, and Tessera
    computes its attention.

    layer: the module's name. skip: where the layer has skip states; None: dense. The own processor has to call
    scaled_dot_product_attention once or twice (Wan's of images), as those of diffusers do with its backend "native".
    """

    def __init__(self, inner: Any, layer: str, handle: TesseraHandle, skip: SkipAttention | None) -> None:
        self.inner, self.layer, self.skip = inner, layer, skip
        self._handle = weakref.ref(handle)

    @classmethod
    def around(cls, inner: Any, layer: str, handle: TesseraHandle, skip: SkipAttention | None) -> TesseraProcessor:
        """One of a class whose __call__ has the parameters of the inner one's: diffusers passes on what that names, and
        drops the rest.
        """

        def call(self: TesseraProcessor, *args: Any, **kwargs: Any) -> Any:
            return cls.__call__(self, *args, **kwargs)

        call.__signature__ = inspect.signature(type(inner).__call__)  # type: ignore[attr-defined]
        return type(cls.__name__, (cls,), {"__call__": call})(inner, layer, handle, skip)

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        handle = self._handle()
        if handle is None:
            raise RuntimeError(
                f"{self.layer}: got a call after its handle was deleted; want the handle of install kept"
            )
        with _Attend(self.layer) as calls:
            calls.run = lambda q, k, v, **options: handle._attend(self, attn, q, k, v, **options)
            out = self.inner(attn, hidden_states, *args, **kwargs)
        if calls.count == 0:
            raise RuntimeError(
                f"{self.layer}: got no call of scaled_dot_product_attention from {type(self.inner).__name__}; want "
                'diffusers\' backend "native" (set_attention_backend)'
            )
        return out


class _Attend(TorchFunctionMode):
    """Inside of it scaled_dot_product_attention is `run` of (batch, seqlen, heads, dim)."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer, self.count = layer, 0
        self.run: Callable[..., Tensor]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _SDPA:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal or dropout_p:
            raise NotImplementedError(
                f"{self.layer}: got is_causal or dropout_p; want neither, as video models have it"
            )
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        if attn_mask is not None:
            options["seqused_k"] = _used(self.layer, attn_mask, query.shape[0], key.shape[2])
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.run(q, k, v, **options).transpose(1, 2)


def _used(layer: str, mask: Tensor, batch: int, seqlen_k: int) -> Tensor:
    """Lengths of keys, int32 (batch), of a bool mask that says nothing else and is the same for all heads, queries."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, 1, seqlen_k):
        raise NotImplementedError(
            f"{layer}: got a mask {mask.dtype} {tuple(mask.shape)}; want key lengths, bool (b, 1, 1, {seqlen_k})"
        )
    shown = mask[:, 0, 0].expand(batch, seqlen_k)
    used = shown.sum(-1, dtype=torch.int32)
    fits = (shown == (torch.arange(seqlen_k, device=mask.device) < used[:, None])).all()
    text = f"{layer}: got a mask with a hidden key before a shown one; want padding at the end"
    if fits.is_cuda:
        torch._assert_async(fits, text)  # does not wait
    elif not fits:
        raise NotImplementedError(text)
    return used


class _Stream(BaseState):
    def __init__(self) -> None:
        self.reset()

    def reset(self, *_: Any, **__: Any) -> None:
        self.steps = 0  # that have begun
        self.timestep: float | None = None
        self.index = -1  # of the pipeline


class _CountSteps(ModelHook):
    """Knows the stream and the step of each call of the model; a pipeline resets it at its end."""

    _is_stateful = True

    def __init__(self, handle: TesseraHandle) -> None:
        super().__init__()
        self.manager = StateManager(_Stream)  # diffusers sets its context
        self._handle = weakref.ref(handle)

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        handle = self._handle()
        if handle is not None:
            context = self.manager._context
            bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
            handle._begin(context, bound.get("timestep"))
        return args, kwargs

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        handle = self._handle()
        if handle is not None:
            handle.reset()
        return module


class TesseraHandle:
    """What `install` gives: states, shares and the way back. Keep it as long as the model runs.

    A run begins with the first call of a stream after `install`, after `reset`, which diffusers' pipelines cause at
    their end, with a step index that goes back, and, where a pipeline tells none, with a timestep above the one before:
    that is read once a call of the model, and on a GPU waited for.
    """

    def __init__(self, model: Any, hook: bool) -> None:
        self.model = model
        self.layers: dict[str, SkipAttention] = {}
        self._own: dict[str, Any] = {}
        self._streams: dict[str, _Stream] = {}
        self._stream, self._step = "", 0
        self._named: str | None = None
        self._must: tuple[Sequence[Range] | None, Sequence[Range] | None] = (None, None)
        if hook:
            HookRegistry.check_if_exists_or_initialize(model).register_hook(_CountSteps(self), _HOOK)
        self._hooked = hook

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Calls inside belong to this stream, for loops that do not say so by diffusers' `model.cache_context`."""
        before, self._named = self._named, name
        try:
            yield
        finally:
            self._named = before

    @property
    def step(self) -> int:
        """The step of the last call of the model."""
        return self._step

    def set_ranges(self, must_do: Sequence[Range] = (), must_skip: Sequence[Range] = ()) -> None:
        """Key tokens that all layers and streams compute, or leave out, from now on (`SkipState.set_ranges`)."""
        self._must = (tuple(must_do), tuple(must_skip))

    @property
    def active(self) -> dict[tuple[str, str], float]:
        """{(layer, stream): share of tiles that its next step computes}. Waits for a GPU."""
        return {
            (layer, stream): skip.state(stream).active for layer, skip in self.layers.items() for stream in skip._states
        }

    def reset(self) -> None:
        """The next call of every stream begins a new run."""
        self._streams = {}

    def remove(self) -> None:
        """Gives the layers their own processors back."""
        modules = dict(self.model.named_modules())
        for name, processor in self._own.items():
            modules[name].set_processor(processor)
        if self._hooked:
            HookRegistry.check_if_exists_or_initialize(self.model).remove_hook(_HOOK, recurse=False)
        self._own, self.layers, self._hooked = {}, {}, False

    def _begin(self, context: Any, timestep: Any) -> None:
        """Before a call of the model: which stream and step it is."""
        self._stream = self._named if self._named is not None else ("" if context is None else context.name)
        stream = self._streams.setdefault(self._stream, _Stream())
        index = getattr(context, "step_index", None)
        if index is not None:  # the pipeline counts; this model may have been given only some of its steps
            if index <= stream.index:
                stream.reset()
            stream.index = index
        elif timestep is not None:
            now = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
            if stream.timestep is not None:
                if now > stream.timestep:
                    stream.reset()
                elif now == stream.timestep and context is None and self._named is None:
                    raise ValueError(
                        f"timestep: got {now} twice in a run without streams; want model.cache_context(name) or "
                        "handle.stream(name) around conditional and unconditional calls"
                    )
            stream.timestep = now
        self._step = stream.steps
        stream.steps += 1

    def _attend(
        self, processor: TesseraProcessor, attn: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        if processor.skip is None or q.shape[1] != k.shape[1]:  # text or images as keys
            return attention(q, k, v, **options)
        must_do, must_skip = self._must
        told = {"step": self._step, "stream": self._stream, "must_do": must_do, "must_skip": must_skip}
        return processor.skip(q, k, v, **told, **options)


def install(
    model: Any,
    *,
    dense: bool = False,
    thresholds: SkipThresholds | None = None,
    only: Callable[[str], bool] | None = None,
    **options: Any,
) -> TesseraHandle:
    """Gives the attention layers of a transformer of diffusers a `TesseraProcessor`.

    Self-attention over the video's tokens has skip states, one a layer and stream of calls; attention to text or images
    is dense, and Hunyuan's text refiner keeps its own processors. Streams are named by `model.cache_context(name)`, in
    which diffusers' pipelines for Wan, HunyuanVideo and CogVideoX call their model, or by `handle.stream(name)`. A call
    is a step of its stream; of two experts (Wan 2.2) each has a handle, and counts its own.

    dense: no states at all, with gradients. thresholds: those of a calibration, whose layers are named as here. only:
    which layers, by name, have states; others are dense. options: those of `SkipState` but for shape and layer; steps
    is the run's number of calls of a stream. Masks are key lengths: bool (batch, 1, 1, keys), padding at the end.

    Raises ValueError for a model without attention processors, TypeError for options beside dense or thresholds; in a
    call, as `SkipAttention` does, NotImplementedError for other masks, RuntimeError where a layer's own processor does
    not call scaled_dot_product_attention.
    """
    if dense and (options or thresholds is not None or only is not None):
        raise TypeError("dense: got True beside options of states; want one or the other")
    if thresholds is not None and options:
        raise TypeError(f"{sorted(options)[0]}: got an argument beside thresholds; want one or the other")
    layers = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "set_processor") and not name.startswith("context_embedder.")
    }
    if not layers:
        raise ValueError(f"model: got {type(model).__name__} without attention processors; want one of diffusers")
    if any(isinstance(module.processor, TesseraProcessor) for module in layers.values()):
        raise ValueError("model: got one with Tessera's processors; want handle.remove() before")
    chosen = {
        name: None
        if dense or not _attends_to_itself(module) or (only is not None and not only(name))
        else SkipAttention(**(thresholds.options(name) if thresholds is not None else {**options, "layer": name}))
        for name, module in layers.items()
    }
    handle = TesseraHandle(model, not dense)
    for name, module in layers.items():
        handle._own[name] = module.processor
        skip = chosen[name]
        if skip is not None:
            handle.layers[name] = skip
        module.set_processor(TesseraProcessor.around(module.processor, name, handle, skip))
    return handle


def _attends_to_itself(module: Any) -> bool:
    return not getattr(module, "is_cross_attention", False) and not getattr(module, "cross_attention_dim_head", None)
