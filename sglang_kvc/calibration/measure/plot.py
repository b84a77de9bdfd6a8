"""Plots of a calibration: size and KL of each format, retention curves, XKV's layer shares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvc_kernels import ops

from .capture import CalibrateError
from .formats import BREAKS_MEAN, OK_MEAN

if TYPE_CHECKING:
    from .passes import Calibration

SHOWN = (0.05, 0.25, 0.5)  # fractions of kept tokens for which layer shares are drawn
MIN_KL = 1e-5  # nats; smaller values are drawn here, on a logarithmic axis


def check(path: str) -> None:
    """CalibrateError when no plot can be drawn to `path`."""
    if Path(path).suffix.lower() != ".png":
        raise CalibrateError(f"--plot {path} is not a PNG file; use a name that ends in .png")
    try:
        import matplotlib  # noqa: F401  (optional)
    except ImportError:
        raise CalibrateError(
            "--plot needs matplotlib, which is not installed; run: pip install 'sglang-kvc[plots]', or drop --plot"
        ) from None


def draw(result: Calibration, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    sizes = [r.token_bytes for r in result.formats]
    kl = [max(r.difference.kl_mean, MIN_KL) for r in result.formats]
    left.scatter(sizes, kl)
    for r, x, y in zip(result.formats, sizes, kl):
        left.annotate(r.format, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    for limit, words in ((OK_MEAN, "ok below"), (BREAKS_MEAN, "breaks above")):
        left.axhline(limit, color="grey", linewidth=0.8, linestyle="--")
        left.annotate(words, (0.99, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    left.set(yscale="log", xlabel="bytes per token", ylabel="KL to bf16, nats per token", title="Formats")

    curves = result.tensors["importance_retention"]
    ramp = pyplot.get_cmap("viridis")
    for i, curve in enumerate(curves.tolist()):
        percent = [100 * (u + 1) / len(curve) for u in range(len(curve))]
        middle.plot(percent, curve, color=ramp(i / max(1, len(curves) - 1)), linewidth=0.9)
    shades = pyplot.cm.ScalarMappable(cmap=ramp, norm=pyplot.Normalize(0, max(1, len(curves) - 1)))
    figure.colorbar(shades, ax=middle, label="layer")
    middle.set(xlabel="% of a prompt's tokens kept", ylabel="attention retained", title="Importance retention")

    layers, units = curves.shape
    for kept in SHOWN:
        total = max(layers, round(kept * layers * units))
        shares = [layers * x / total for x in ops.greedy_allocation(curves, total, 1)]
        right.plot(range(layers), shares, marker=".", label=f"{100 * kept:g} % kept")
    right.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    right.legend()
    right.set(xlabel="layer", ylabel="share of the kept tokens, times layers", title="XKV's shares (dashed: uniform)")
    figure.suptitle(f"{result.identity}; {result.settings['tokens']} tokens", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
