# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` with Tessera's attention: the same command, arguments and server.

python examples/serve/serve.py my-gpt-llama --continuous-batching --port 8000
"""

from __future__ import annotations

import sys

import tessera.transformers
import transformers
from transformers.cli.transformers import app

if __name__ == "__main__":
    tessera.transformers.register()
    tessera.transformers.use_continuous_batching(transformers.GenerationMixin)  # of every model that generates
    sys.argv = ["transformers serve", "serve", *sys.argv[1:]]
    sys.exit(app())
