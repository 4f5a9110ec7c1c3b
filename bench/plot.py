"""TTFT and ITL against load, as a PNG: `bench serve --concurrency 1,4,16 --plot load.png`.

Needs matplotlib, which is imported only here and only when a plot is asked for. Knows results, not servers.
"""

from typing import Any


def plot_load(runs: list[dict[str, Any]], file: str) -> None:
    """Two panels over the concurrency: TTFT and ITL with median and 99th percentile, and the throughput behind them.

    Raises ValueError when matplotlib is missing, when fewer than two runs have figures, or for a name it cannot write.
    """
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    good = sorted((run for run in runs if run.get("successful_requests")), key=lambda run: run["load"]["concurrency"])
    if len(good) < 2:
        raise ValueError("--plot needs figures at two loads at least, for example --concurrency 1,4,16")
    loads = [run["load"]["concurrency"] for run in good]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for panel, key, title in zip(panels, ("ttft_s", "itl_s"), ("TTFT", "ITL"), strict=True):
        for rank, style in (("p50", "o-"), ("p99", "s--")):
            points = [(load, run[key][rank] * 1000) for load, run in zip(loads, good, strict=True)
                      if run[key][rank] is not None]
            panel.plot([x for x, _ in points], [y for _, y in points], style, label=f"{title} {rank}")
        panel.set(xlabel="requests in flight", ylabel=f"{title} (ms)", xscale="log")
        panel.set_xticks(loads, [str(load) for load in loads])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        other = panel.twinx()
        other.plot(loads, [run["output_tok_s"] for run in good], color="grey", alpha=0.5, label="output tok/s")
        other.set_ylabel("output tok/s", color="grey")
        other.set_ylim(bottom=0)
        panel.legend(loc="best")
    load = good[0]["load"]
    lengths = f"{_range(load.get('prompt_tokens'))} prompt and {_range(load.get('output_tokens'))} output tokens"
    figure.suptitle(f"{good[0].get('model', '')}: {lengths}")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {file}: {error}") from None
    finally:
        pyplot.close(figure)


def _range(ends: Any) -> str:
    """64, or 32-64."""
    return "?" if not ends else str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"
