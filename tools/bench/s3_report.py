"""Tables, ratios and the bar chart of the benchmark."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.s3_peers import OURS

Table = dict[str, dict[str, Any]]
"""Peer to what was measured; `absent` says why nothing was."""


@dataclass(frozen=True)
class Claim:
    """One quantity of all peers, and what ours is to be in ratio to some of them.

    Args:
        title: for people.
        what: name of the quantity in the table.
        unit: its unit.
        table: what was measured.
        wanted: name of the comparison, peers (the best counts), `<=` or `>=`, and the ratio.
        most: limit of ours itself.
        note: why there is nothing.
    """

    title: str
    what: str
    unit: str
    table: Table
    wanted: list[tuple[str, list[str], str, float]]
    most: float | None = None
    note: str = ""

    @classmethod
    def limit(
        cls, title: str, what: str, unit: str, found: dict[str, Any], most: float | None
    ) -> Claim:
        """Return a claim about ours alone."""
        return cls(title, what, unit, {OURS: found}, [], most)

    def value(self, peer: str) -> float | None:
        """Return the value of a peer, if there is one."""
        value = self.table.get(peer, {}).get(self.what)
        return None if value is None else float(value)

    def ratios(self) -> Iterator[tuple[str, float, str, float, bool]]:
        """Yield each comparison: with what, ratio, relation, target, and whether it holds."""
        ours = self.value(OURS)
        for name, peers, relation, target in self.wanted:
            values = [value for peer in peers if (value := self.value(peer)) is not None]
            if ours is not None and values:
                ratio = ours / (min(values) if relation == "<=" else max(values))
                holds = ratio <= target if relation == "<=" else ratio >= target
                yield name, ratio, relation, target, holds
        if ours is not None and self.most is not None:
            yield "limit", ours, "<=", self.most, ours <= self.most

    @property
    def kept(self) -> bool:
        """Whether every comparison that was possible holds."""
        return all(holds for *_, holds in self.ratios())


def write(claims: list[Claim], directory: Path) -> str:
    """Write `results.json`, `results.md` and `results.png`; return the text of the second."""
    directory.mkdir(parents=True, exist_ok=True)
    text = markdown(claims)
    (directory / "results.md").write_text(text)
    facts = [
        {"title": claim.title, "unit": claim.unit, "table": claim.table, "kept": claim.kept}
        for claim in claims
    ]
    (directory / "results.json").write_text(json.dumps(facts, indent=1))
    if any(len(claim.table) > 1 for claim in claims):
        chart([claim for claim in claims if len(claim.table) > 1], directory / "results.png")
    return text


def markdown(claims: list[Claim]) -> str:
    """Return a table of all values with their ratio to ours, and one of the targets."""
    lines = ["| measured | who | value | to ours |", "|---|---|---:|---:|"]
    for claim in claims:
        ours = claim.value(OURS)
        if claim.note:
            lines.append(f"| {claim.title} | | {claim.note} | |")
        for peer, found in claim.table.items():
            value = claim.value(peer)
            if value is None:
                shown, ratio = _absence(found), ""
            else:
                shown = f"{value:.3g} {claim.unit}" if value < 100 else f"{value:.0f} {claim.unit}"
                ratio = f"{value / ours:.2f}" if ours else ""
            lines.append(f"| {claim.title} | {peer} | {shown.strip()} | {ratio} |")
    lines += ["", "| target | reached | wanted | |", "|---|---:|---:|---|"]
    for claim in claims:
        for name, reached, relation, target, holds in claim.ratios():
            verdict = "yes" if holds else "**no**"
            lines.append(
                f"| {claim.title}, to {name} | {reached:.2f} | {relation} {target:g} | {verdict} |"
            )
    return "\n".join(lines) + "\n"


def _absence(found: dict[str, Any]) -> str:
    reason = str(found.get("absent", "not measured"))
    return "not installed" if reason.startswith(("No module", "dask-pytorch-ddp")) else reason


def chart(claims: list[Claim], path: Path) -> None:
    """Draw bars, ours in colour; nothing without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        return
    rows = -(-len(claims) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(10, 2.1 * rows), squeeze=False)
    for axis in axes.flat[len(claims) :]:
        axis.axis("off")
    for axis, claim in zip(axes.flat, claims, strict=False):
        found = [(peer, value) for peer in claim.table if (value := claim.value(peer)) is not None]
        names = [peer for peer, _ in reversed(found)]
        values = [value for _, value in reversed(found)]
        colours = ["#1f6fb4" if name.startswith(OURS) else "#b8bfc6" for name in names]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, fmt=lambda value: f"{value:.3g}", padding=3, fontsize=8)
        unit = "" if claim.unit == "/s" else f" ({claim.unit})"
        axis.set_title(claim.title + unit, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
