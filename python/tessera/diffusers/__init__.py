# SPDX-License-Identifier: Apache-2.0
"""Video transformers of diffusers with Tessera's attention, dense or with skip states by layer and stream.

    from tessera.diffusers import install

    handle = install(pipe.transformer, steps=50)        # skip states; install(pipe.transformer, dense=True) has none
    video = pipe(prompt, num_inference_steps=50)
    print(handle.active)

Needs torch and diffusers 0.35 or newer.
"""

from .processor import TesseraHandle, TesseraProcessor, install

__all__ = ["TesseraHandle", "TesseraProcessor", "install"]
