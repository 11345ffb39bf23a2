"""Correct the leads of files whose answers are no longer there: `lead_p`, `lead_holds` and `rank` from their own rows.

Rows up to 2026-11-18 drew seeds with replacement, which leaves p no tail, so Holm's rule corrected nothing. What is
needed to draw them from Student's t is in the rows: the deviation of either method over seeds, and the interval of the
lead, of which the part that seeds do not explain is the questions'. Retentions, leads and intervals stay as they are.

    python runs/leads_again.py results/*.json
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from diffprune.atomic import write_text
from diffprune.evaluate.bootstrap import LEVEL, holm, two_sided_p
from diffprune.evaluate.leads import NO_RIVALS, enough_resamples

Row = dict[str, Any]
NORMAL = 1.959964
WIDENED = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # deviations over so many seeds were multiplied by it over NORMAL
SAID = "lead_p, lead_holds and rank again by runs/leads_again.py, with seeds from Student's t"


def correct(rows: list[Row]) -> bool:
    """Whether there was a lead over methods of several seeds; all leads of one file are corrected together."""
    leads = [row for row in rows if "lead_p" in row]
    ours = {id(row): _ours(row, rows) for row in leads}
    if all(row["n_seeds"] < 2 and ours[id(row)]["n_seeds"] < 2 for row in leads):
        return False
    tables: dict[Any, list[Row]] = defaultdict(list)
    for row in leads:  # positions are a table for each method: it is compared with itself
        tables[row.get("tasks"), row.get("backbone"), row["method"] if "positions" in row else None].append(row)
    for table in tables.values():
        count = enough_resamples(len(table))
        raw = [two_sided_p(_drawn(row, ours[id(row)], count, place)) for place, row in enumerate(table)]
        for row, p in zip(table, holm(raw), strict=True):
            low, high = row["lead_ci95"]
            row |= {"lead_p": p, "lead_holds": p < LEVEL and not low <= 0 <= high}
    for row in sorted((row for row in rows if "rank" in row), key=lambda row: row["rank"]):
        best = row["rank"] == 1 or any(one.get("rank") == 1 for one in rows if _table(one) == _table(row))
        if not (best and _is_claimed(row, rows)):
            del row["rank"]
    return True


def _table(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("keep", "tasks", "backbone", "positions"))


def _ours(row: Row, rows: list[Row]) -> Row:
    same = ("keep", "tasks", "backbone")
    (found,) = (
        one
        for one in rows
        if "retention" in one
        and all(one.get(key) == row.get(key) for key in same)
        and (
            (one.get("positions"), one["method"]) == (row["versus"], row["method"])
            if "positions" in row
            else one["method"] == row["versus"]
        )
    )
    return found


def _drawn(row: Row, ours: Row, count: int, place: int) -> Any:
    """The lead in as many resamples."""
    low, high = row["lead_ci95"]
    questions = ((high - low) / 2 / NORMAL) ** 2
    generator = np.random.default_rng([7, place])
    values = np.full(count, float(row["lead"]))
    for one in (row, ours):
        if (seeds := one["n_seeds"]) > 1:
            error = one["retention_std"] / math.sqrt(seeds)
            questions -= (error * WIDENED[seeds] / NORMAL) ** 2
            values += error * generator.standard_t(seeds - 1, count)
    return values + math.sqrt(max(questions, 0.0)) * generator.standard_normal(count)


def _is_claimed(row: Row, rows: list[Row]) -> bool:
    """As `evaluate.rows` marks: nothing that the leads do not hold."""
    if "lead_holds" in row:
        return row["lead_holds"]
    below = [
        one
        for one in rows
        if one.get("keep") == row["keep"]
        and one.get("versus") == row["method"]
        and one["retention"] < row["retention"]
        and one["method"] not in NO_RIVALS
        and not one["method"].endswith("-throttled")
    ]
    return all(one["lead_holds"] for one in below)


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


for path in map(Path, sys.argv[1:]):
    text = path.read_text(encoding="utf-8")
    before, after = (json.loads(text) for _ in range(2))
    if not correct(after["rows"]):
        continue
    if SAID not in after["notes"]:
        after["notes"] = "; ".join(filter(None, (after["notes"], SAID)))
    pairs = [*zip(before["rows"], after["rows"], strict=True), (before["notes"], after["notes"])]
    for old, new in pairs:
        if old != new:
            assert text.count(_line(old)) == 1, f"{path} is not as `write_results` writes it"
            text = text.replace(_line(old), _line(new))
    write_text(path, text)
    held, hold = (sum(row.get("lead_holds", False) for row in one["rows"]) for one in (before, after))
    print(f"{path}: {held} leads held, {hold} do")
