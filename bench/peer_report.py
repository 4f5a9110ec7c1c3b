"""The comparison as a table, as Markdown and as a chart. Knows a result of bench/peers.py, no engine and no process.

A claim is a ratio of medians within one result: the best of ours over the best peer that the row allows.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bench.stats import median

OURS = "threefold"
FLOAT_OURS, FLOAT_PEERS = "threefold-f32", ("vllm-f32", "vllm-f32-compiled", "llama-f32")
TITLES = {"c1": "c1: 256 in, 128 out, one at a time", "c8": "c8: eight at once", "c32": "c32: 32 at once",
          "prefill": "prefill only, 8 x 256: input tok/s", "shared": "16 requests, shared 192-token prefix",
          "shape c1": "Qwen3-0.6B shape, random weights: decode, one", "shape c8": "the same, eight at once"}
CHART_TITLES = {"c1": "1 request", "c8": "8 at once", "c32": "32 at once", "prefill": "prefill, input tokens",
                "shared": "16, shared prefix"}
# row: (least ratio to the best peer, ratio aimed at); for c1 the best peer of like accuracy, and never below any.
RATIOS = {"c1": (1.5, 2.5), "c8": (2.0, 3.5), "c32": (2.5, 4.0), "prefill": (1.5, 3.0), "shared": (2.0, 4.0),
          "shape c1": (2.0, 3.0), "shape c8": (2.5, 5.0)}
FLOAT_RATIOS = {"prefill": 0.95}                # of float32 to float32; 1 for the rows not named
LIMITS = {"first_token_s": (8.0, 4.0), "peak_mb": (1500.0, 800.0)}      # at most: must, aim
LIMIT_TITLES = {"first_token_s": "start to first token, s", "peak_mb": "peak memory, MB"}


class Claim(NamedTuple):
    """What one row says. ratio None: nothing to compare with."""
    row: str
    ours: str
    peer: str
    ratio: float | None
    must: float
    aim: float

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "no peer"
        return "aim" if self.ratio >= self.aim else "must" if self.ratio >= self.must else "below must"


def value(result: dict[str, Any], name: str, row: str) -> float | None:
    """A peer's median of a row."""
    values = result["peers"].get(name, {}).get("rows", {}).get(row, {}).get("value")
    return median(values) if values else None


def best(result: dict[str, Any], row: str, names: list[str]) -> tuple[str, float] | None:
    found = [(name, figure) for name in names if (figure := value(result, name, row)) is not None]
    return max(found, key=lambda pair: pair[1]) if found else None


def claims(result: dict[str, Any]) -> list[Claim]:
    """The best of ours against the best of theirs, and float32 against float32, row by row."""
    peers = result["peers"]
    ours = [name for name in peers if peers[name]["engine"] == OURS]
    theirs = [name for name in peers if peers[name]["engine"] != OURS]
    made = []
    for row, (must, aim) in RATIOS.items():
        mine = best(result, row, ours)
        allowed = [name for name in theirs if peers[name]["like"]] if row == "c1" else theirs
        pairs = [(best(result, row, allowed), must, aim)]
        if row == "c1":
            pairs.append((best(result, row, theirs), 1.0, 1.0))
        made += [_claim(row, mine, other, least, wanted) for other, least, wanted in pairs if mine is not None]
    for row in TITLES:
        mine = best(result, row, [FLOAT_OURS])
        other = best(result, row, [name for name in FLOAT_PEERS if name in peers])
        if mine is not None:
            least = FLOAT_RATIOS.get(row, 1.0)
            made.append(_claim(row + ", float32", mine, other, least, least))
    return made


def _claim(row: str, mine: tuple[str, float], other: tuple[str, float] | None, must: float, aim: float) -> Claim:
    return Claim(row, mine[0], other[0] if other else "", mine[1] / other[1] if other else None, must, aim)


def ours_first(result: dict[str, Any]) -> list[str]:
    return sorted(result["peers"], key=lambda name: result["peers"][name]["engine"] != OURS)


def figure_rows(result: dict[str, Any], names: list[str]) -> list[list[str]]:
    """Title and one cell a peer; decode tok/s in brackets where it is known and differs from the figure."""
    rows = []
    for row, title in TITLES.items():
        cells = []
        for name in names:
            figure, decode = value(result, name, row), result["peers"][name]["rows"].get(row, {}).get("decode")
            shown = "" if figure is None else f"{figure:.0f}" if figure >= 20 else f"{figure:.1f}"
            cells.append(shown + (f" ({median(decode):.0f})" if decode and not row.startswith("shape") else ""))
        if any(cells):
            rows.append([title, *cells])
    for key, title in LIMIT_TITLES.items():
        rows.append([title, *(f"{peer[key]:.1f}" if key.endswith("_s") else f"{peer[key]:.0f}"
                              for peer in map(result["peers"].get, names))])
    return rows


def markdown_tables(result: dict[str, Any]) -> list[str]:
    lines = []
    for is_shape in (False, True):
        names = [name for name in ours_first(result) if ("shape" in name) == is_shape]
        if names:
            head = ["decode tok/s" if is_shape else "output tok/s (decode)", *names]
            lines += [_line(head), _line(["---"] * len(head)), *map(_line, figure_rows(result, names)), ""]
    lines += [_line(["row", "ours", "best peer", "ratio", "must", "aim", "reached"]), _line(["---"] * 7)]
    for claim in claims(result):
        ratio = "" if claim.ratio is None else f"{claim.ratio:.2f}"
        lines.append(_line([claim.row, claim.ours, claim.peer, ratio, f"{claim.must:g}", f"{claim.aim:g}",
                            claim.verdict]))
    for key, (must, aim) in LIMITS.items():
        worst = max(((peer[key], name) for name, peer in result["peers"].items() if _is_main(name, peer)),
                    default=None)
        if worst is not None:
            reached = "aim" if worst[0] <= aim else "must" if worst[0] <= must else "above must"
            lines.append(_line([LIMIT_TITLES[key], worst[1], "", f"{worst[0]:.1f}", f"<= {must:g}", f"<= {aim:g}",
                                reached]))
    return lines


def _is_main(name: str, peer: dict[str, Any]) -> bool:
    """Ours on the demo model, quantized: the rows of start and memory."""
    return peer["engine"] == OURS and "shape" not in name and name != FLOAT_OURS


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def print_table(result: dict[str, Any]) -> None:
    print("\n".join(markdown_tables(result)))


def write_markdown(result: dict[str, Any], path: Path) -> None:
    versions = [f"- {engine}: {text}" for engine, text in result["versions"].items()]
    weights = [f"- {name}: {peer['weights']}, measured {peer['time']} UTC" for name, peer in result["peers"].items()]
    text = [f"# Peers on {result['machine']}, {result['date']}", "",
            f"SmolLM2-135M-Instruct; medians of {result['repeats']} runs of `bench serve`, each against the same start",
            "of a server, greedy, ignore_eos, random prompts. Same cores and room for 16,384 cached tokens for all.",
            "Peak memory is the sum over a server's processes. transformers is a library without a server: one call of",
            "generate with all prompts.", "", *markdown_tables(result), "", "## Versions", "", *versions, "",
            "## Weights", "", *weights, ""]
    path.write_text("\n".join(text))


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Bars for each row, every peer beside ours. Needs matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows = [row for row in CHART_TITLES if best(result, row, list(result["peers"]))]
    figure, panels = pyplot.subplots(1, len(rows), figsize=(3.0 * len(rows), 4.2), layout="constrained", squeeze=False)
    for panel, row in zip(panels[0], rows, strict=True):
        bars = [(name, figure_) for name in ours_first(result) if (figure_ := value(result, name, row)) is not None]
        colours = ["tab:blue" if result["peers"][name]["engine"] == OURS else "silver" for name, _ in bars]
        panel.barh([name for name, _ in bars], [bar for _, bar in bars], color=colours)
        panel.invert_yaxis()
        panel.set_title(CHART_TITLES[row], fontsize=10)
        panel.tick_params(labelsize=8)
        for at, (_, bar) in enumerate(bars):
            panel.text(bar, at, f" {bar:.0f}", va="center", fontsize=8)
        panel.margins(x=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"SmolLM2-135M, tok/s (more is better), {result['machine']}, {result['date']}", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
