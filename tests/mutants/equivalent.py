"""Mutants that change nothing that anyone could see, each with the reason why."""

_EMPTY_PIECE = "a piece of padding without slots takes nothing and gives nothing"
_LONGER = "a rule that is plain at a greater length is at a smaller one, and where it is not, the exact length is asked"
_NO_BIAS = "what is None needs no gradient, so that the second question only tells the type checker"
_NO_ROWS = "a chunk without rows adds a loss of 0 and a gradient of 0"
_EQUAL = "tuples are compared by order only where they differ, and None differs only from numbers, told apart before"
_NO_LIMIT = "without a limit no layout is asked for, so that the first question only tells the type checker"
_SINGLE = "the last single distance and the first bucket that grows are numbered alike"
_FOUND = "the greatest distance reaches every bucket, so that the search ends before what stands behind it"

EQUIVALENT: dict[str, str] = {
    "nn/backends/sdpa.py _pieces: start > done -> start >= done": _EMPTY_PIECE,
    "nn/backends/sdpa.py _pieces: done < layout.rows * layout.slots"
    " -> done <= layout.rows * layout.slots": _EMPTY_PIECE,
    "nn/backends/sdpa.py infer_is_causal: key.slots - 1 -> key.slots + 1": _LONGER,
    "nn/backends/sdpa.py infer_is_causal: is_plain_causal(rule, length) or is_plain_causal(rule, key.slots)"
    " -> is_plain_causal(rule, key.slots)": _LONGER,
    "nn/losses.py _loss_and_gradients: x is not None and needs -> needs": _NO_BIAS,
    "nn/losses.py _loss_and_gradients: range(0, hidden_CD.shape[0], chunk_size)"
    " -> range(0, hidden_CD.shape[0] + 1, chunk_size)": _NO_ROWS,
    "models/model.py Model.resolve_coordinates: most is not None and layout is not None and"
    " (layout.max_position >= most)"
    " -> layout is not None and layout.max_position >= most": _NO_LIMIT,
    "nn/positions/biases.py RelativeBias._bucket: distance < self.single -> distance <= self.single": _SINGLE,
    "nn/positions/biases.py _bounds: range(single, max_distance + 1) -> range(single, max_distance + 1 + 1)": _FOUND,
    "visibility/rules.py And.lookback: r[0] or 0 -> r[0]": _EQUAL,
}
