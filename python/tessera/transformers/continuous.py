# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers with Tessera's attention.

transformers 5.24 takes three attentions there: `paged|eager`, `sdpa`, and FlashAttention's own by name. The check is a
method of its manager, which a subclass answers otherwise; all else is transformers': scheduler, cache, sampling.
"""

from __future__ import annotations

import types
from math import ceil
from typing import Any

from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, PreTrainedModel

__all__ = ["TesseraBatchingManager", "use_continuous_batching"]

_PAGES = 32  # of a request, where neither the configuration nor the workload says


class TesseraBatchingManager(ContinuousBatchingManager):
    """A `ContinuousBatchingManager` whose model computes attention by an implementation that `register` has entered."""

    implementation = "tessera"

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: Any,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        pages = continuous_batching_config.max_blocks_per_request
        if pages is None:
            pages = _pages_of(workload_hints, continuous_batching_config.page_size)
        continuous_batching_config.max_blocks_per_request = 0
        super().__init__(
            model=model,
            generation_config=generation_config,
            continuous_batching_config=continuous_batching_config,
            workload_hints=workload_hints,
        )
        # Block tables, which transformers would give to FlashAttention on GPUs alone and warn of here. It takes them
        # back for models whose sliding layers have caches of another kind.
        self.continuous_batching_config.max_blocks_per_request = pages

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Gives the model Tessera's attention until the manager stops. It needs no dense mask."""
        before = model.config._attn_implementation
        if before != self.implementation:
            model.set_attn_implementation(self.implementation)
            self._original_attn_impl = before


def use_continuous_batching(
    model: PreTrainedModel | type[PreTrainedModel], name: str = "tessera"
) -> PreTrainedModel | type[PreTrainedModel]:
    """Makes continuous batching of a model (`generate_batch`, `init_continuous_batching`, servers) compute by Tessera.

    Steps in which every request decodes one token read the pages of the cache where they lie, as long as no request has
    more than `ContinuousBatchingConfig.max_blocks_per_request` of them (default: what the workload needs where it is
    known, else 32; 0: never). Steps with a prefill, requests with more pages, and models with sliding layers read what
    transformers gathers from the cache. Written against transformers 5.24.

    Args:
        model: any that generates, on the CPU or a GPU; or a class, for all of its models that are made later, as a
            server makes them. Changed, and returned.
        name: the implementation, as `tessera.transformers.register` has entered it.

    Raises:
        ValueError: a name that is no implementation.
    """
    from transformers import AttentionInterface

    if name not in AttentionInterface():
        raise ValueError(f"name: got {name!r}; want one that tessera.transformers.register has entered")
    manager_class = type("TesseraBatchingManager", (TesseraBatchingManager,), {"implementation": name})
    theirs = (model if isinstance(model, type) else type(model)).init_continuous_batching

    def init_continuous_batching(
        self: PreTrainedModel,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        if getattr(self, "_cached_continuous_batching_manager", None) is not None:
            return theirs(self)
        generation = self.generation_config if generation_config is None else generation_config
        if generation.eos_token_id is None:
            generation.eos_token_id = -1  # as transformers has it: no token ends a text
        config = ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config
        return manager_class(self, generation, config, workload_hints)

    bound = init_continuous_batching if isinstance(model, type) else types.MethodType(init_continuous_batching, model)
    model.init_continuous_batching = bound
    return model


def _pages_of(hints: Any, page_size: int) -> int:
    """Pages of the longest request of a known workload."""
    longest = 0 if hints is None else hints.max_prompt_length + hints.max_generated_length
    return ceil(longest / page_size) + 1 if longest > 0 else _PAGES
