"""How much of a row is hidden, and how. The shared config may set both names again.

Each row of a batch is drawn from one stage, with a chance in proportion to the stage's weight (1 if it has none).

    random    a share of the row, drawn for each row between min_ratio and max_ratio, anywhere in it
    sticky    spans: positions are hidden in rounds until `ratio` of the row is, and in each round a position is hidden
              with probability p_start, or with p_grow where a neighbour is hidden already

A ratio that is not given is `mask_probability`.
"""

unmasking_stages = [
    {"type": "random", "weight": 1},  # mask_probability of each row
    {"type": "random", "min_ratio": 0.2, "max_ratio": 1.0, "weight": 2},  # what a sample from nothing goes through
    {"type": "sticky", "ratio": 0.4, "p_start": 0.01, "p_grow": 0.3, "weight": 1},
]
validation_stages = [
    {"type": "random", "min_ratio": 0.2, "max_ratio": 0.4},
    {"type": "sticky", "ratio": 0.3, "p_start": 0.01, "p_grow": 0.3},
]
