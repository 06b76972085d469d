"""What a config of this project must satisfy. batchwright reports all of it at once, beside its own findings."""

WHOLE_NUMBERS = (
    *("max_iters", "eval_interval", "val_batches", "warmup_iters"),
    *("n_layer", "n_head", "n_embd", "num_threads"),
)
SHARES = ("mask_probability", "val_fraction", "learning_rate")
KEYS = {
    "random": {"type", "weight", "min_ratio", "max_ratio"},
    "sticky": {"type", "weight", "ratio", "p_start", "p_grow"},
}


def validate(config):
    """One line for each problem; none: the config can be used."""
    return [
        *about_settings(config),
        *about_stages(config, "unmasking_stages"),
        *about_stages(config, "validation_stages"),
    ]


def about_settings(config):
    wrong = [name for name in WHOLE_NUMBERS if not isinstance(config.get(name), int) or config[name] < 1]
    for name in wrong:
        yield f"{name} must be a whole number of at least 1, got {config.get(name)!r}"
    if not wrong and config["n_embd"] % config["n_head"]:
        yield f"n_embd={config['n_embd']} does not divide by n_head={config['n_head']}"
    for name in SHARES:
        if not is_between(0, config.get(name), 1):
            yield f"{name} must be a number above 0 and below 1, got {config.get(name)!r}"
    if not isinstance(config.get("ignore_index"), int) or config["ignore_index"] >= 0:
        yield f"ignore_index must be below 0, where no character is, got {config.get('ignore_index')!r}"


def about_stages(config, name):
    """What is wrong with a list of stages; each line says which stage, counted from 0."""
    stages = config.get(name)
    if not isinstance(stages, list) or not stages:
        yield f"{name} must be a list of at least one stage, got {stages!r}"
        return
    lines = [f"{name}[{number}]: {line}" for number, stage in enumerate(stages) for line in about_stage(stage)]
    yield from lines
    if not lines and not any(stage.get("weight", 1) for stage in stages):
        yield f"{name}: every weight is 0, and one at least must be above"


def about_stage(stage):
    if not isinstance(stage, dict):
        yield f"a stage must be a dict, got {stage!r}"
        return
    kind = stage.get("type")
    if kind not in KEYS:
        yield f"type must be one of {', '.join(KEYS)}, got {kind!r}"
        return
    for key in sorted(stage.keys() - KEYS[kind]):
        yield f"a {kind} stage has no {key}; it has {', '.join(sorted(KEYS[kind]))}"
    ratios = {key: stage[key] for key in ("ratio", "min_ratio", "max_ratio") if key in stage}
    wrong = {key: ratio for key, ratio in ratios.items() if ratio != 1 and not is_between(0, ratio, 1)}
    for key, ratio in wrong.items():
        yield f"{key} must be above 0 and at most 1, got {ratio!r}"
    if "max_ratio" in ratios and not wrong:
        if "min_ratio" not in ratios:
            yield "a stage with max_ratio must have min_ratio too"
        elif ratios["min_ratio"] > ratios["max_ratio"]:
            yield f"min_ratio {ratios['min_ratio']} is above max_ratio {ratios['max_ratio']}"
    for key in ("p_start", "p_grow") if kind == "sticky" else ():
        if stage.get(key) != 1 and not is_between(0.001, stage.get(key), 1):  # less takes hundreds of rounds
            yield f"{key} must be above 0.001 and at most 1, got {stage.get(key)!r}"
    weight = stage.get("weight", 1)
    if weight != 0 and not is_between(0, weight, float("inf")):
        yield f"weight must be a number, 0 or above, got {weight!r}"


def is_between(low, value, high):
    """Whether it is a number between the two, and neither of them. NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high
