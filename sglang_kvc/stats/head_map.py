"""The head map, tokens kept by each head of each layer, as HTML or SVG (no dependency) or PNG (matplotlib)."""

from __future__ import annotations

from html import escape
from pathlib import Path

from sglang_kvc.stats.records import HeadMap

CELL_W, CELL_H, GAP = 22, 22, 1
LEFT, TOP, BOTTOM, LEGEND = 54, 30, 44, 24
# Darker cells keep more tokens. The palest is visible on white and in print.
PALE, DARK = (237, 243, 250), (11, 61, 110)


def draw(head_map: HeadMap, path: Path, *, title: str, caption: str, rows: list[tuple[str, str]]) -> None:
    """Write the map to `path`, in the format of its suffix."""
    kind = path.suffix.lower()
    if kind == ".png":
        _png(head_map, path, title, caption)
    elif kind == ".svg":
        path.write_text(svg(head_map), encoding="utf-8")
    elif kind in (".html", ".htm"):
        path.write_text(html(head_map, title, caption, rows), encoding="utf-8")
    else:
        raise ValueError(f"the map file {path.name} has an unknown suffix; use .html, .svg or .png")


def color(share: float) -> str:
    share = min(max(share, 0.0), 1.0)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(PALE, DARK))


def panels(head_map: HeadMap) -> list[tuple[str, list[list[float]]]]:
    """Panels to draw: kept tokens and, if a low tier holds some of them, tokens of the high tier."""
    shown = [("Share of tokens kept, by layer and KV head", head_map.kept)]
    if head_map.high != head_map.kept:
        shown.append(("Share of tokens kept at high precision", head_map.high))
    return shown


def svg(head_map: HeadMap) -> str:
    """Layers from left to right, heads from top to bottom; a cell shows its numbers on hover."""
    layers, heads = head_map.shape
    shown = panels(head_map)
    panel_height = TOP + heads * CELL_H + BOTTOM
    width = max(LEFT + layers * CELL_W + 20, 420)
    height = panel_height * len(shown) + LEGEND
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, (words, shares) in enumerate(shown):
        out.append(f'<g transform="translate(0 {i * panel_height})">{_panel(head_map, words, shares)}</g>')
    return "\n".join([*out, _legend(height - LEGEND), "</svg>"])


def _panel(head_map: HeadMap, words: str, shares: list[list[float]]) -> str:
    layers, heads = head_map.shape
    x: float
    y: float
    out = [f'<text x="{LEFT}" y="16" font-size="13">{words}</text>']
    for layer in range(layers):
        for head in range(heads):
            kept, high = head_map.kept[layer][head], head_map.high[layer][head]
            x, y = LEFT + layer * CELL_W, TOP + head * CELL_H
            fill = color(shares[layer][head])
            out.append(
                f'<rect x="{x}" y="{y}" width="{CELL_W - GAP}" height="{CELL_H - GAP}" fill="{fill}">'
                f"<title>layer {layer}, head {head}: {100 * kept:.1f} % kept, {100 * high:.1f} % high</title></rect>"
            )
    for head in range(0, heads, _step(heads)):
        y = TOP + head * CELL_H + CELL_H * 0.65
        out.append(f'<text x="{LEFT - 6}" y="{y:.0f}" text-anchor="end">{head}</text>')
    below = TOP + heads * CELL_H
    for layer in range(0, layers, _step(layers)):
        x = LEFT + layer * CELL_W + CELL_W / 2
        out.append(f'<text x="{x:.0f}" y="{below + 14}" text-anchor="middle">{layer}</text>')
    out.append(f'<text x="8" y="{TOP + 14}">head</text>')
    out.append(f'<text x="{LEFT}" y="{below + 30}">layer</text>')
    return "\n".join(out)


def _legend(y: float) -> str:
    steps = 11
    cells = [
        f'<rect x="{LEFT + 34 + i * 16}" y="{y}" width="16" height="12" fill="{color(i / (steps - 1))}"/>'
        for i in range(steps)
    ]
    end = LEFT + 34 + steps * 16 + 6
    return f'<text x="{LEFT}" y="{y + 10}">0 %</text>' + "".join(cells) + f'<text x="{end}" y="{y + 10}">100 %</text>'


def _step(n: int) -> int:
    """Interval of labels: every cell if there are few, else every fifth or tenth."""
    return 1 if n <= 16 else 5 if n <= 50 else 10


def html(head_map: HeadMap, title: str, caption: str, rows: list[tuple[str, str]]) -> str:
    below = escape(f"{caption}; {head_map.blocks} packed blocks")
    body = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>KV cache of {escape(title)}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fff; margin: 2em; }}
th {{ text-align: left; font-weight: 600; padding-right: 1.5em; vertical-align: top; }}
figure {{ margin: 1.5em 0; overflow-x: auto; }}
</style></head><body>
<h1>KV cache of {escape(title)}</h1>
<table>{body}</table>
<figure>{svg(head_map)}
<figcaption>{below}. Point at a cell for its numbers.</figcaption></figure>
</body></html>
"""


def _png(head_map: HeadMap, path: Path, title: str, caption: str) -> None:
    try:
        import matplotlib  # optional
    except ImportError:
        raise ValueError(
            "a PNG needs matplotlib; run: pip install 'sglang-kvc[plots]', or choose a .html or .svg file"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LinearSegmentedColormap

    layers, heads = head_map.shape
    shown = panels(head_map)
    ramp = LinearSegmentedColormap.from_list("kept", [color(0), color(1)])
    size = (max(7.0, layers * 0.22 + 2), (heads * 0.22 + 0.9) * len(shown) + 1.3)
    figure, grid = pyplot.subplots(len(shown), figsize=size, layout="constrained", squeeze=False)
    for axes, (words, shares) in zip(grid[:, 0], shown):
        by_head = [[shares[layer][head] for layer in range(layers)] for head in range(heads)]
        image = axes.imshow(by_head, cmap=ramp, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(words, fontsize=9)
        axes.set(xlabel="layer", ylabel="KV head")
        axes.set_yticks(range(0, heads, _step(heads)))
        axes.set_xticks(range(0, layers, _step(layers)))
    figure.suptitle(f"{title}\n{caption}", fontsize=8)
    figure.colorbar(image, ax=grid, location="bottom", shrink=0.6, aspect=40)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
