"""Read and write the ``config.json`` keys of rotary positions and sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.limits import shorten_repr
from meshwright.spec.config_reader import Reader
from meshwright.spec.families import FAMILIES, Family, Setting, Windows
from meshwright.spec.rope_scaling import RopeScaling, read_rope_scaling, write_rope_scaling

if TYPE_CHECKING:
    from meshwright.spec.config import ModelConfig


def read_rope(fields: dict[str, Any], read: Reader) -> None:
    """Read the ModelConfig fields of rotary positions from a ``config.json`` and add them to ``fields``: bases,
    scaling, and the rotated fraction of a head. The ``config.json`` has them under ``rope_theta`` and ``rope_scaling``
    (transformers 4) or ``rope_parameters`` (transformers 5). read: typed access to the file."""
    family, data, where = FAMILIES[fields["family"]], read.data, read.where
    fields["rope_theta"] = read.number(("rope_theta",), 10000.0)
    if family.partial_rotation:
        fields["rotary_fraction"] = read.number(("partial_rotary_factor",), 1.0)
    if "window_rope_theta" in family.settings:
        _read_two_rotations(fields, read, family.settings["window_rope_theta"])
        return
    # In a file with both keys rope_scaling takes precedence, as in transformers 5.
    missing = not data.get("rope_scaling") and not data.get("rope_parameters")
    data = {**data, "rope_parameters": read.defaults.get("rope_parameters")} if missing else data
    for key in ("rope_scaling", "rope_parameters"):
        entry, at = _read_object(data, key, where), f"{where}: {key}"
        if not entry:
            continue
        per_type = {name: value for name, value in entry.items() if isinstance(value, Mapping)}
        if per_type:
            found = list(per_type.values())
            if any(value != found[0] for value in found):
                raise UserError(f"{at}: rotary positions that differ between layers are not supported")
            entry = found[0]
        if data.get("original_max_position_embeddings") is not None:
            entry = {**entry, "original_max_position_embeddings": data["original_max_position_embeddings"]}
        elif family.partial_rotation and read.defaults.get("original_max_position_embeddings") is not None:
            # transformers' class default takes the place of the key, and so precedence over the object.
            entry = {**entry, "original_max_position_embeddings": read.defaults["original_max_position_embeddings"]}
        fields["rope_theta"], fields["rope_scaling"] = _read_rotation(entry, fields, at)
        return


def _read_two_rotations(fields: dict[str, Any], read: Reader, local: Setting) -> None:
    """Read the rotary ModelConfig fields of a family whose sliding-window layers have a separate rotary base, and add
    them to ``fields``.

    ``rope_parameters`` is used only if it has an object for each layer type ("full_attention", "sliding_attention"), as
    in transformers; ``rope_scaling`` applies only to the layers without a window. read: typed access to the file.
    local: key of the rotary base of the sliding-window layers.
    """
    scaled, nested = (_read_object(read.data, name, read.where) for name in ("rope_scaling", "rope_parameters"))
    at = f"{read.where}: rope_parameters"
    full, windowed = (_read_object(nested, name, at) for name in ("full_attention", "sliding_attention"))
    where = f"{read.where}: rope_scaling" if scaled else f"{at}: full_attention"
    fields["rope_theta"], fields["rope_scaling"] = _read_rotation({**full, **scaled}, fields, where)
    base = read.defaults[local.key] if local.kind == "nested" else read.number((local.key,), 10000.0)
    windowed = {"rope_theta": base, **windowed}
    fields["window_rope_theta"], scaling = _read_rotation(windowed, fields, f"{at}: sliding_attention")
    if scaling is not None:
        raise UserError(f"{at}: RoPE scaling in layers with a sliding window is not supported")


def _read_object(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Return the object under `key` in `data`, {} if it is missing or null; ``UserError`` for another type. where: name
    of `data` in errors."""
    entry = {} if data.get(key) is None else data[key]
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: {key} must be an object, not {shorten_repr(entry)}")
    return entry


def _read_rotation(entry: Mapping[str, Any], fields: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Read the rotary base and the scaling method from a ``rope_scaling`` or ``rope_parameters`` object (`entry`);
    return (base, scaling). Also add the rotated fraction of a head to ``fields``.

    fields: ModelConfig fields read so far, which this function extends. where: name of the object in errors."""
    family, inner = FAMILIES[fields["family"]], Reader(entry, {}, where)
    fraction = inner.number(("partial_rotary_factor",), fields.get("rotary_fraction", 1.0))
    if family.partial_rotation:
        fields["rotary_fraction"] = fraction
    elif fraction != 1.0 and family.name != "nemotron":
        raise UserError(f'{where}: "partial_rotary_factor" other than 1 is not supported')
    theta = inner.number(("rope_theta",), fields["rope_theta"])
    if family.name == "phi3" and entry.get("rope_type", entry.get("type")) in ("su", "yarn"):  # its former names
        entry = {**entry, "rope_type": "longrope"}
    return theta, read_rope_scaling(entry, max_positions=fields["max_positions"], where=where)


def read_windows(fields: dict[str, Any], read: Reader) -> None:
    """Read the ModelConfig fields ``sliding_window`` (tokens), ``windowed_layers`` and ``unrotated_layers`` from a
    ``config.json`` and add them to ``fields``. read: typed access to the file."""
    family, layers, data, where = FAMILIES[fields["family"]], fields["layers"], read.data, read.where
    rule = family.windows
    if rule is None:  # transformers' Llama has no window and ignores the key
        return
    if rule.unrotated:
        fields["unrotated_layers"] = _read_unrotated(read, layers, rule)
    _, window = read.get((rule.key,))
    if rule.switch and not read.boolean("use_sliding_window"):
        window = None
    types = data.get("layer_types") if rule.listed else None
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise UserError(f'{where}: "layer_types" must be a list of {layers} names, one for each layer')
        for name in types:
            if name not in ("full_attention", rule.layer_type):
                raise UserError(
                    f"{where}: layer type {shorten_repr(name)} is not supported (full_attention, {rule.layer_type})"
                )
        windowed = [name == rule.layer_type for name in types]
        if rule.layers == "unrotated" and window is None and any(windowed) and data.get("sliding_window") is not None:
            raise UserError(
                f'{where}: "layer_types" lists sliding_attention, which "use_sliding_window" = false contradicts; '
                f"{family.name} supports only one or the other"
            )
    else:
        windowed = _make_default_windows(rule, fields, read)
    if window is None or not any(windowed):
        return
    fields["sliding_window"] = read.integer("sliding_window", (rule.key,))
    fields["windowed_layers"] = None if all(windowed) else tuple(windowed)


def _make_default_windows(rule: Windows, fields: Mapping[str, Any], read: Reader) -> list[bool]:
    """Return which layers have a sliding window, bool per layer, for a ``config.json`` without the key ``layer_types``.
    rule: the family's rule. fields: ModelConfig fields read so far. read: typed access to the ``config.json``.
    """
    numbers = range(fields["layers"])
    match rule.layers:
        case "all":
            return [True for _ in numbers]
        case "periodic":
            period = read.integer("layers", (rule.period_key,), rule.period) if rule.period_key else rule.period
            return [(index + 1) % period != 0 for index in numbers]
        case "unrotated":
            return [index in fields["unrotated_layers"] for index in numbers]
        case "rotated":
            return [index not in fields["unrotated_layers"] for index in numbers]
        case "early":  # as in transformers 5: every other layer among the first max_window_layers
            first = _read_window_layers(read)
            return [index % 2 == 0 and index < first for index in numbers]
        case "late":
            first = _read_window_layers(read)
            return [index >= first for index in numbers]


def _read_unrotated(read: Reader, layers: int, rule: Windows) -> tuple[int, ...]:
    """Return the indices of the layers without rotary positions: the layers with a 0 in ``no_rope_layers`` or, without
    that key, every ``no_rope_layer_interval``-th layer (default: the period of the family's `rule`). read: typed access
    to the ``config.json``. layers: number of layers."""
    _, listed = read.get(("no_rope_layers",))
    every = read.integer("layers", ("no_rope_layer_interval",), rule.period)
    if listed is None or (rule.chunked and listed == []):  # as Llama 4's files have it
        return tuple(index for index in range(layers) if (index + 1) % every == 0)
    if not isinstance(listed, list) or len(listed) < layers or any(entry not in (0, 1) for entry in listed):
        raise UserError(f'{read.where}: "no_rope_layers" must be a list of {layers} zeros and ones, one for each layer')
    return tuple(index for index in range(layers) if not listed[index])  # a longer list may follow, as in transformers


def resize_patterns(config: ModelConfig, layers: int) -> dict[str, Any]:
    """Return the per-layer ModelConfig fields of `config` for another number of layers (`layers`), as {field: value}:
    ``unrotated_layers``, ``windowed_layers`` and, if dense layers are interleaved, ``dense_layers``. Each pattern of
    layers is cut to fewer layers, or continued to more layers by the family's rule."""
    rule = FAMILIES[config.family].windows
    by_rule = rule.layers if rule is not None else "all"
    unrotated = [index in config.unrotated_layers for index in range(config.layers)]
    period = rule.period if rule is not None and rule.unrotated else None
    unrotated = _continue_pattern(unrotated, layers, period, True)
    fields: dict[str, Any] = {"unrotated_layers": tuple(index for index in range(layers) if unrotated[index])}
    if config.sliding_window is not None:
        windowed = [config.layer_window(index) is not None for index in range(config.layers)]
        period = rule.period if rule is not None and by_rule in ("periodic", "unrotated", "rotated") else None
        windowed = _continue_pattern(windowed, layers, period, by_rule == "unrotated")
        fields["windowed_layers"] = None if all(windowed) else tuple(windowed)
    if config.experts_keys is not None and config.experts_keys.dense == "interleaved":
        dense = [index in config.dense_layers for index in range(config.layers)]
        dense = _continue_pattern(dense, layers, 1, False)
        fields["dense_layers"] = tuple(index for index in range(layers) if dense[index])
    return fields


def _continue_pattern(pattern: list[bool], layers: int, period: int | None, marked: bool) -> list[bool]:
    """Cut or continue `pattern`, one value per layer, to `layers` layers; return the result.

    period: None: repeat the last value. Otherwise the family's rule gives every `period`-th layer the value `marked`,
    and all others the opposite. A pattern that follows this rule, with this or another period, is continued by the
    rule. Any other pattern is continued by repeating its shortest period."""
    if period is None or layers <= len(pattern):
        return (pattern + pattern[-1:] * layers)[:layers]
    for each in (period, *range(1, len(pattern) + 1)):
        regular = [((index + 1) % each == 0) == marked for index in range(layers)]
        if regular[: len(pattern)] == pattern:
            return regular
    repeats = (each for each in range(1, len(pattern) + 1) if pattern[each:] == pattern[:-each])
    shortest = next(repeats)
    return [pattern[index % shortest] for index in range(layers)]


def _read_window_layers(read: Reader) -> int:
    """Return ``max_window_layers`` of a Qwen2 ``config.json`` (default 28). In qwen2 it is the index of the first layer
    with a sliding window, in qwen2_moe the index of the first layer without a window. read: typed access to the file.
    """
    _, value = read.get(("max_window_layers",), 28)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f'{read.where}: "max_window_layers" must be a whole number, not {shorten_repr(value)}')
    return value


def write_rope(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the ``config.json`` keys of rotary positions with their values, in the spellings of transformers 4 and 5;
    the inverse of `read_rope`. family: the family of `config`."""
    scaling = write_rope_scaling(config.rope_scaling) if config.rope_scaling else None
    plain = {"rope_type": "default"}
    written: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    parameters: dict[str, Any] = {"rope_theta": config.rope_theta, **(scaling or plain)}
    if family.partial_rotation:
        written["partial_rotary_factor"] = parameters["partial_rotary_factor"] = config.rotary_fraction
        if config.rope_scaling is not None and config.rope_scaling.original_max_positions is not None:
            written["original_max_position_embeddings"] = config.rope_scaling.original_max_positions
    if config.window_rope_theta is not None:
        local = {"rope_theta": config.window_rope_theta, **plain}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    return written | {"rope_parameters": parameters}


def write_windows(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the ``config.json`` keys of sliding windows with their values; the inverse of `read_windows`. family: the
    family of `config`."""
    rule, written = family.windows, dict[str, Any]()
    if rule is None:
        return written
    windowed = [config.layer_window(index) is not None for index in range(config.layers)]
    written[rule.key] = config.sliding_window
    if rule.switch:
        written["use_sliding_window"] = any(windowed)
    if rule.listed:
        written["layer_types"] = [rule.layer_type if is_windowed else "full_attention" for is_windowed in windowed]
    if rule.layers in ("late", "early"):
        written["max_window_layers"] = windowed.index(True) if any(windowed) else config.layers
    if rule.unrotated:
        written["no_rope_layers"] = [int(index not in config.unrotated_layers) for index in range(config.layers)]
    return written
