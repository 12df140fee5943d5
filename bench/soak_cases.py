"""Random choices of `soak.py`: configurations for up to four ranks, and faults with their times."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.layout import Layout
from meshwright.recipe import Recipe

STEPS = 16
SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v", "dualpipe")

KILLS = ("kill rank", "kill launcher", "kill everything")
SIGNALS = ("terminate launcher", "interrupt launcher")
STOPS = ("stop rank", "stop rank for a while")
DISKS = ("fill disk", "fill disk for a while")
RESTARTED = "kill rank of a run with --restarts"
KINDS = (*KILLS, *SIGNALS, *STOPS, *DISKS, RESTARTED)

_WEIGHTS = {"kill rank": 5, "kill launcher": 4, "kill everything": 3, "stop rank": 2}
_CODES: dict[str, tuple[int, ...]] = {
    "kill rank": (3,),
    "kill launcher": (-9,),
    "kill everything": (-9,),
    "terminate launcher": (143,),
    "interrupt launcher": (130,),
    "stop rank": (3,),
    "stop rank for a while": (0,),
    "fill disk": (2,),
    "fill disk for a while": (0, 2),
    RESTARTED: (0,),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and when it strikes.

    rank: the rank struck, where the fault is a rank's. moment: "start" (before the first step), "step" (training),
    "save" (a checkpoint is being written). progress: 0 to 1, of the start-up or of the steps that are left. delay: 0 to
    1, of a step or of a save, from when that progress is reached. lasts: seconds, of faults that pass.
    """

    kind: str
    rank: int
    moment: str
    progress: float
    delay: float
    lasts: float

    @property
    def codes(self) -> tuple[int, ...]:
        """Exit codes of a command that the fault strikes before its run is complete."""
        return _CODES[self.kind]


def draw_faults(random: Random, ranks: int, small_disks: bool) -> list[Fault]:
    """One fault, or in a quarter of the trials two; `small_disks`: whether a disk can be made that fills up."""
    kinds = [kind for kind in KINDS if (ranks > 1 or kind not in STOPS) and (small_disks or kind not in DISKS)]
    faults = []
    for _ in range(random.choices((1, 2), (3, 1))[0]):
        kind = random.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
        moment = random.choices(("start", "step", "save"), (3, 7, 10))[0]
        if kind == "fill disk for a while" and moment == "start":
            moment = "step"
        faults.append(
            Fault(kind, random.randrange(ranks), moment, random.random(), random.random(), random.uniform(0.05, 1.5))
        )
    return faults


def draw_recipe(random: Random, source: str, cache: str) -> Recipe:
    """A tiny model under a random layout, precision, optimizer and manner of saving. source, cache: of its data."""
    while True:
        layout, mixture = _draw_layout(random)
        tables: dict[str, Any] = {
            "layout": layout,
            "run": {"seed": random.randrange(1000)},
            "model": {
                "family": "mixtral" if mixture else "llama",
                "layers": 4,
                "hidden": 32,
                "heads": 4,
                "kv_heads": 2,
                "intermediate": 64,
                **({"experts": 4} if mixture else {}),
                "tied": random.random() < 0.3,
            },
            "data": {
                "source": source,
                "tokenizer": "bytes",
                "sequence": random.choice((16, 32, 48)),
                "validation_fraction": 0.1,
                "cache": cache,
            },
            "train": {
                "steps": STEPS,
                "batch": random.choice((8, 16)),
                "learning_rate": 1e-2,
                "warmup": random.choice((0, 3)),
                "compile": random.random() < 0.03,
                "validate_every": random.choice((0, 0, 4)),
                "validation_sequences": 4,
                **({} if random.random() < 0.8 else {"optimizer": "sgd", "momentum": 0.9}),
            },
            "checkpoint": {
                "every": random.choice((1, 2, 3, 5)),
                "keep": random.choice((1, 2, 3)),
                "background": random.random() < 0.8,
                "dtype": random.choice(("float32", "bfloat16")),
            },
        }
        try:
            recipe = Recipe.from_tables(tables)
            check_recipe(recipe)
        except UserError:
            continue
        return recipe


def _draw_layout(random: Random) -> tuple[str, bool]:
    """A layout on 1, 2 or 4 ranks, not yet checked, and whether it is for a mixture of experts."""
    ranks = random.choices((1, 2, 4), (2, 14, 3))[0]
    sizes = {"dp": 1, "tp": 1, "cp": 1, "pp": 1}
    while ranks > 1:
        sizes[random.choices(("dp", "tp", "cp", "pp"), (4, 2, 2, 3))[0]] *= 2
        ranks //= 2
    mixture = random.random() < 0.25
    parts = [f"dp{sizes['dp']}"]
    if zero := random.randrange(4):
        parts.append(f"zero{zero}")
        if sizes["dp"] * sizes["cp"] == 4 and random.random() < 0.5:
            parts.append("hs2")
    if sizes["tp"] > 1:
        parts.append(f"tp{sizes['tp']}{random.choice(('', ':nosp'))}")
    if sizes["cp"] > 1:
        parts.append(f"cp{sizes['cp']}:{random.choice(('ring', 'ulysses'))}")
    if sizes["pp"] > 1:
        parts.append(f"pp{sizes['pp']}:{random.choice(SCHEDULES)}")
    parts.append(f"mb{random.choice((2, 4)) if sizes['pp'] > 1 else random.choice((1, 1, 2))}")
    if mixture and random.random() < 0.6:
        parts.append("ep2")
    parts.append(f"ac:{random.choice(('none', 'none', 'selective', 'full'))}")
    parts.append(random.choices(("fp32", "bf16", "fp16"), (3, 2, 1))[0])
    return " ".join(parts), mixture


def axes_of(layout: str) -> list[str]:
    """The keys under which a layout is counted: its number of ranks and the parts of its canonical form."""
    parsed = Layout.parse(layout)
    return [f"{parsed.world_size} rank{'s' * (parsed.world_size > 1)}", *str(parsed).split()]
