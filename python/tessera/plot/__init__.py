# SPDX-License-Identifier: Apache-2.0
"""Pictures of tile lists, of probability mass per tile, and of what `tessera bench` measured; needs matplotlib.

`tiles` and `bench` return a `matplotlib.figure.Figure` that belongs to no window and no global state: save it with
`figure.savefig(path)`; a notebook shows it. The same from a shell:

    python -m tessera.plot tiles mass.npy -o mass.svg
    python -m tessera.plot bench bench/results/MACHINE/cpu_dense.json -o speed.svg
"""

from tessera.plot._bench import bench
from tessera.plot._tiles import tiles

__all__ = ["bench", "tiles"]
