"""Default layouts of `meshwright verify`: every axis of parallelism, and every pair of axes."""

from __future__ import annotations

from meshwright.layout import Layout

GRID = tuple(map(Layout.parse, (
    # 1 rank
    "mb2", "ac:selective", "mb4 ac:full",
    # 2 ranks
    "dp2 zero3", "tp2", "cp2", "pp2:zb-h1 mb2", "zero2 cp2 mb2 ac:selective", "zero3 cp2:ulysses mb2 ac:full",
    "pp2:looped-bfs mb4", "pp2:interleaved-zb mb4", "pp2:v-half mb4", "pp2:v-min mb4", "pp2:dualpipe-v mb4",
    "pp2:auto mb4", "pp2:interleaved:3 mb4", "zero1 cp2:ulysses ep2", "zero2 cp2:ulysses mb2 ac:selective", "dp2",
    "dp2 mb4", "tp2:nosp", "zero3 cp2 mb2 ac:full", "cp2:ulysses", "zero2 cp2 ep2", "dp2 ep2",
    # 3 ranks
    "dp3 zero1 ac:full", "dp3 zero2 mb2 ac:selective", "tp3", "cp3", "pp3:zb-v mb5", "tp3:nosp", "cp3:ulysses",
    "dp3 ac:selective", "dp3 zero2", "dp3 zero3 ac:selective", "dp3 ep3 ac:selective",
    # 4 ranks
    "dp2 zero3 tp2 ep2:etp2 ac:full", "dp2 zero1 pp2 mb4 ac:selective", "tp2:nosp pp2:zb-v mb2 ac:full",
    "tp2 cp2:ulysses mb2 ep2:etp2", "dp2 zero2 pp2:interleaved mb4 ac:full", "dp2 zero3 tp2:nosp ep2:etp2 ac:selective",
    "zero2 cp2 pp2:zb-h1 mb2", "dp2 zero2 pp2:dualpipe mb4 ac:selective", "dp2 zero1 pp2:gems mb4 ac:selective",
    "pp4:gpipe mb8", "dp2 zero2 pp2:zb-h2 mb4", "dp4 zero2 hs2 ep4", "dp2 zero1 pp2:zb-h1 mb2 ep1:etp2",
    "tp4 mb2 ac:selective", "cp4", "dp2 zero3 pp2:zb-v mb4 ac:selective", "dp2 zero3 pp2:dualpipe-v mb4 ac:full",
    "tp2 pp2 mb2", "cp2:ulysses pp2:dualpipe mb4", "dp4 zero2 hs2 ep1:etp2", "tp4:nosp", "dp2 zero2 tp2 ac:full",
    "cp4:ulysses", "dp2 pp2:gpipe mb4", "dp2 zero3 pp2:looped-bfs mb4", "dp2 pp2:interleaved-zb mb4 ac:selective",
    "dp2 zero1 pp2:v-min mb4", "dp2 pp2:auto mb4 ac:selective", "cp2 pp2 mb2", "tp2:nosp cp2:ulysses ep2:etp2",
    "cp2 pp2:chimera mb2", "dp2 pp2 mb2 ep2", "dp2 pp2:chimera mb2 ep1:etp2", "dp4 ac:full", "dp4 mb2", "dp4 zero1",
    "dp4 zero1 mb2 ac:selective", "tp4", "tp4 mb2 ac:full", "dp2 zero1 tp2 mb2 ac:selective", "dp2 zero2 tp2:nosp mb2",
    "dp2 zero2 cp2:ulysses", "pp4 mb8", "pp4:zb-h1 mb8", "dp2 zero1 pp2:zb-h1 mb4 ac:full", "pp4:zb-h2 mb8",
    "dp2 pp2:v-half mb4 ac:full", "pp4:dualpipe mb8", "pp4:gems mb8", "tp2 cp2 ep2:etp2", "cp2:ulysses pp2 mb2",
    "cp2:ulysses pp2:zb-h1 mb2", "dp2 pp2:dualpipe mb4 ep2", "dp2 pp2:zb-v mb4 ep2", "dp2 pp2 mb2 ep1:etp2",
    "tp2:nosp pp2 mb2", "tp2:nosp pp2:chimera mb2",
    # 8 ranks
    "dp4 zero3 hs2 pp2:chimera mb2 ac:full", "dp2 zero3 hs2 tp2 cp2 ac:selective", "dp8 zero3 hs4 mb2 ep2",
    "dp4 zero1 hs2 tp2:nosp", "tp2 pp4:chimera mb4", "dp2 zero1 cp2 pp2:v-half mb4", "tp2 cp2 pp2:interleaved mb2",
    "tp8", "tp2:nosp cp4", "cp8", "dp4 zero3 hs2 pp2 mb2", "pp8 mb4", "dp4 zero3 hs2 pp2:zb-h1 mb2",
    "dp8 zero2 hs2 mb2", "dp8 zero1", "dp2 zero3 tp4", "dp4 zero1 hs2 tp2 mb2",
    "dp2 zero3 hs2 tp2 cp2:ulysses ac:selective", "dp2 zero3 tp2 pp2:zb-v mb2 ac:selective", "dp8 zero2 ep4:etp2",
)))  # fmt: skip
"""Layouts of up to 8 ranks, in ascending order of rank count. A test checks that they cover every axis, ZeRO stage and
schedule, and every pair of such features."""
MIXTURES = tuple(map(Layout.parse, ("dp2 zero3", "tp2", "cp2", "pp2:zb-h1 mb2")))
"""Layouts of the grid that leave every expert on every rank and yet are verified with a mixture of experts."""
