"""Diagrams of boxes and arrows: tensor and sequence parallelism, axes of a layout, flow of data through the project."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot

from meshwright.draw.markup import Markup
from meshwright.draw.picture import Picture, css_var
from meshwright.draw.text_width import estimate_text_width
from meshwright.layout import AXES, Layout

GROUP_COLOURS = ("blue", "orange", "green", "purple", "teal", "yellow", "pink", "grey")


def draw_arrow(
    picture: Picture, begin: tuple[float, float], end: tuple[float, float], colour: str = "dim", words: str = ""
) -> None:
    """Draw an arrow into `picture`.

    begin, end: points (x, y) in pixels. colour: name of a colour in the style sheet, such as "blue". words: label
    next to the middle of the arrow, empty for no label.
    """
    (x1, y1), (x2, y2) = begin, end
    length = hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    foot = x2 - 7 * dx, y2 - 7 * dy
    style = f"stroke:{css_var(colour)};stroke-width:1.6"
    picture.add("line", x1=x1, y1=y1, x2=foot[0], y2=foot[1], style=style)
    sides = [(foot[0] - 3.8 * dy, foot[1] + 3.8 * dx), (foot[0] + 3.8 * dy, foot[1] - 3.8 * dx)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *sides])
    picture.add("polygon", points=points, style=f"fill:{css_var(colour)}")
    if words:
        picture.add_text((x1 + x2) / 2 + 8 * abs(dy), (y1 + y2) / 2 - 6 * abs(dx) + 4 * abs(dy), words,
                     "middle" if abs(dx) > abs(dy) else None, class_="dim small")  # fmt: skip


def draw_box(
    picture: Picture, corner: tuple[float, float], size: tuple[float, float], lines: Sequence[str], colour: str
) -> None:
    """Draw a box with centred lines of text into `picture`; the first line is bold.

    corner: (x, y) of the box's top left corner, in pixels. size: (width, height), in pixels. colour: colour of frame
    and background, named as in the style sheet, such as "blue".
    """
    (x, y), (width, height) = corner, size
    style = f"fill:{css_var(colour)};fill-opacity:.18;stroke:{css_var(colour)};stroke-width:1.4"
    picture.add("rect", x=x, y=y, width=width, height=height, rx=6, style=style)
    first = y + height / 2 + 4 - 8 * (len(lines) - 1)
    for number, line in enumerate(lines):
        kind = "small" if number else "strong"
        picture.add_text(x + width / 2, first + 16 * number, line, "middle", class_=kind)


_TOP = 126  # y coordinate of the first box
# Steps of a transformer layer, from top to bottom: text, second line, region it belongs to.
_SHARDED, _SPLIT = "sequence", "tensor"
_HALVES = (
    ("norm", ("QKV projection", "columns split: heads/t"), ("attention", "heads/t, full sequence"),
     ("output projection", "rows split: partial sums")),
    ("norm", ("gate and up projections", "columns split: f/t"), ("SwiGLU", "elementwise, f/t"),
     ("down projection", "rows split: partial sums")),
)  # fmt: skip


def draw_tensor_sequence() -> Markup:
    """Return an SVG diagram of a transformer layer under tensor and sequence parallelism, with the collectives of its
    forward and backward (Korthikanti et al. 2022, arXiv 2205.05198, Figures 5 and 6)."""
    picture = Picture()
    picture.add_text(
        14, 22, "A transformer layer under tensor + sequence parallelism, on each of t ranks", class_="title"
    )
    entries = [("sequence-parallel region: a rank has s/t tokens, all h features", "green"),
               ("tensor-parallel region: a rank has all s tokens, 1/t of heads or features", "blue"),
               ("collective over the t ranks", "orange")]  # fmt: skip
    said = "b sequences of s tokens; h features per token, f inside the MLP. Forward runs downwards, backward upwards."
    picture.add_text(14, 42, said, class_="dim")
    picture.add_legend([(words, {"style": f"fill:{css_var(colour)}"}) for words, colour in entries], 14, 960, 62)
    halves = [(14, 0, "attention"), (500, 1, "MLP")]
    for left, number, name in halves:
        norm, *products = _HALVES[number]
        x, wide, y = left + 100, 230, _TOP
        middle = x + wide / 2
        picture.add_text(left + 2, y - 18, f"{name} half", class_="strong")
        picture.add_text(
            middle + 8, y - 8, "x: (b, s/t, h)" if number == 0 else "from the attention half", class_="dim small"
        )
        draw_arrow(picture, (middle, y - 20), (middle, y), "green")
        boxes: list[tuple[tuple[str, ...], str]] = [
            ((norm, "s/t tokens; parameters on every rank"), "green"),
            (("all-gather over s", "backward: reduce-scatter"), "orange"),
            *((words, "blue") for words in products),
            (("reduce-scatter over s", "backward: all-gather"), "orange"),
            (("add to the residual", "s/t tokens"), "green"),
        ]
        for at, (words, colour) in enumerate(boxes):
            draw_box(picture, (x, y), (wide, 42), words, colour)
            if at + 1 < len(boxes):
                draw_arrow(picture, (middle, y + 42), (middle, y + 64), "blue" if 1 <= at <= 4 else "green")
            y += 64
        out = y - 64 + 42
        draw_arrow(picture, (middle, out), (middle, out + 24), "green")
        picture.add_text(middle + 8, out + 18, "to the MLP half" if number == 0 else "(b, s/t, h)", class_="dim small")
        # The residual bypasses the half: it stays sharded over the sequence.
        line = f"M{middle} {_TOP - 8} H{left + 60} V{out - 21} H{x - 7}"
        picture.add("path", d=line, style=f"fill:none;stroke:{css_var('green')};stroke-width:1.6;stroke-dasharray:5 4")
        draw_arrow(picture, (x - 12, out - 21), (x, out - 21), "green")
        picture.add_text(left + 54, (_TOP + out) / 2, "residual", "end", class_="dim small")
        picture.add_text(x + wide + 12, _TOP + 64 + 26, "s/t → s tokens", class_="dim small")
        picture.add_text(x + wide + 12, _TOP + 5 * 64 + 26, "s → s/t tokens,", class_="dim small")
        picture.add_text(x + wide + 12, _TOP + 5 * 64 + 40, "partial sums added", class_="dim small")
    bottom = _TOP + 7 * 64 + 32
    said = (
        "An all-gather and a reduce-scatter together move the bytes of the all-reduce that they replace: 2(t − 1)/t of"
    )
    picture.add_text(14, bottom, said, class_="dim")
    said = (
        "b·s·h elements per rank in each half (attention, MLP) of the layer, in the forward and again in the backward."
    )
    picture.add_text(14, bottom + 17, said, class_="dim")
    return picture.to_svg(980, bottom + 31, "transformer layer under tensor and sequence parallelism", alone=True)


def draw_layout_axes() -> Markup:
    """Return an SVG with one grid of all ranks for each axis (tp, cp, dp, pp) of the parallel layout "dp2 tp2 cp2 pp2"
    on 16 ranks; ranks of one process group of the axis have the same colour."""
    layout = Layout.parse("dp2 tp2 cp2 pp2")
    meanings = {
        "tp": "splits a layer's matrices", "cp": "splits each sequence", "dp": "splits the batch",
        "pp": "splits the layers",
    }  # fmt: skip
    picture = Picture()
    picture.add_text(
        14,
        22,
        f"Process groups of the layout {layout}: the same {layout.world_size} ranks, once for each axis",
        class_="title",
    )
    lines = (
        f"A box is a rank: its number, and below its coordinates {', '.join(AXES)} (innermost axis first). "
        f"A line of {layout.world_size // layout.pp} boxes is a pipeline rank.",
        "Ranks of one colour form a process group of the axis: they differ in the coordinate of that axis alone.",
    )
    for number, line in enumerate(lines):
        picture.add_text(14, 42 + 17 * number, line, class_="dim")
    cell, a_row = 52, layout.world_size // layout.pp
    width = a_row * cell
    for number, axis in enumerate(AXES):
        left, top = 14 + number % 2 * (width + 40), 80 + number // 2 * (layout.pp * cell + 44)
        picture.add_text(left, top + 12, f"{axis}{getattr(layout, axis)}", class_="strong")
        step = layout.groups(axis)[0][1] - layout.groups(axis)[0][0] if getattr(layout, axis) > 1 else 0
        words = f"{meanings[axis]}; ranks of a group are {step} apart"
        picture.add_text(left + 36, top + 12, words, class_="dim")
        for group, ranks in enumerate(layout.groups(axis)):
            colour = GROUP_COLOURS[group % len(GROUP_COLOURS)]
            for rank in ranks:
                x, y = left + rank % a_row * cell, top + 22 + rank // a_row * cell
                style = f"fill:{css_var(colour)};fill-opacity:.4;stroke:{css_var(colour)}"
                picture.add("rect", x=x + 1, y=y, width=cell - 4, height=cell - 4, rx=5, style=style)
                picture.add_text(x + cell / 2 - 1, y + 20, str(rank), "middle", class_="strong")
                place = layout.coordinates(rank)
                words = ",".join(str(place[one]) for one in AXES)
                picture.add_text(x + cell / 2 - 1, y + 37, words, "middle", class_="small")
    bottom = 80 + 2 * (layout.pp * cell + 44)
    return picture.to_svg(28 + 2 * width + 40, bottom - 12, f"process groups of the layout {layout}", alone=True)


def draw_data_flow() -> Markup:
    """Return an SVG diagram of the flow of data through Meshwright, from the recipe (job file) through training to
    the server."""
    picture = Picture()
    picture.add_text(14, 22, "How a job flows through Meshwright: data go one way", class_="title")
    boxes = [
        ("recipe", "recipe/: one TOML file", "model, data, training", "blue"),
        ("plan", "planner/: time and memory", "of every layout", "blue"),
        ("layout", "layout.py: dp2 tp2 pp4:zb-v", "checked, canonical", "blue"),
        ("mesh", "comm/: process groups", "of every axis", "orange"),
        ("programs", "schedules/, collectives/", "checked, simulated", "green"),
        ("sharded model", "model/, parallel/:", "local tensors, axis by axis", "orange"),
        ("data", "data/: tokenized, cleaned,", "packed, in sample order", "blue"),
        ("loop", "training/: steps, optimizer,", "metrics", "orange"),
        ("verification", "verification/: the step", "against one device's", "green"),
        ("checkpoint", "checkpoint/: Hugging Face", "files, any layout reads it", "purple"),
        ("server", "serving/: scheduler,", "KV blocks, HTTP", "purple"),
        ("evaluation", "evaluation/: loss of texts,", "by the server's engine", "green"),
    ]
    wide, high, across, down = 200, 62, 250, 118
    places = {"recipe": (0, 0), "plan": (1, 0), "layout": (2, 0), "programs": (3, 0), "mesh": (2, 1),
              "sharded model": (1, 1), "data": (0, 2), "loop": (1, 2), "verification": (2, 2), "checkpoint": (1, 3),
              "server": (2, 3), "evaluation": (3, 3)}  # fmt: skip
    at = {name: (14 + column * across, 44 + line * down) for name, (column, line) in places.items()}
    for name, *lines, colour in boxes:
        assert all(estimate_text_width(line, 11) < wide for line in lines), name
        draw_box(picture, at[name], (wide, high), [name, *lines], colour)
    for source, target, words in (
        ("recipe", "plan", ""), ("plan", "layout", ""), ("layout", "programs", ""), ("layout", "mesh", ""),
        ("mesh", "sharded model", ""), ("sharded model", "loop", ""), ("recipe", "data", "prepares once"),
        ("data", "loop", ""), ("loop", "verification", ""), ("loop", "checkpoint", "writes"),
        ("checkpoint", "server", ""), ("server", "evaluation", ""),
    ):  # fmt: skip
        (x1, y1), (x2, y2) = at[source], at[target]
        if y1 == y2:
            right = x2 > x1
            begin = float(x1 + wide * right), y1 + high / 2
            end = float(x2 + wide * (not right)), y2 + high / 2
        else:
            begin, end = (x1 + wide / 2, float(y1 + high)), (x2 + wide / 2, float(y2))
        draw_arrow(picture, begin, end, "dim", words)
    x, y = at["programs"]
    lx, ly = at["loop"]
    path = f"M{x + wide / 2} {y + high} V{ly + high + 22} H{lx + wide * 0.75} V{ly + high + 7}"
    picture.add("path", d=path, style=f"fill:none;stroke:{css_var('dim')};stroke-width:1.6")
    draw_arrow(picture, (lx + wide * 0.75, ly + high + 14), (lx + wide * 0.75, ly + high), "dim")
    words = "who computes what, who sends what to whom, in which order"
    picture.add_text(x + wide / 2, ly + high + 38, words, "end", class_="dim small")
    return picture.to_svg(
        14 + 3 * across + wide + 14, at["server"][1] + high + 20, "flow of data through Meshwright", alone=True
    )
