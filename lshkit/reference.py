"""Every op in plain numpy and float64, written to be read: the oracle of the tests.

Nothing here is fast, and some of it is quadratic on purpose. Arrays have any leading dimensions,
`(..., rows, columns)`; every result is float64 (codes: unsigned integers).

Sources: Zeng et al., "You Only Sample (Almost) Once" (YOSO, ICML 2021), equations 1-4; Charikar
(2002) for random hyperplanes; Andoni et al. (2015) for the fast Hadamard rotations.
"""

import numpy as np

# ---------------------------------------------------------------- hash families


def walsh_hadamard(size):
    """Sylvester's matrix in natural order, unnormalised: H[i, j] = (-1)^popcount(i & j)."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix


@np.errstate(invalid="ignore")  # infinity - infinity, in the rows that hold them
def hyperplane_projections(x, parameters, n_bits, n_hashes):
    """Dot products with random normals (Charikar 2002): row j * n_bits + b is bit b of hash j."""
    planes = np.asarray(parameters, np.float64).reshape(n_hashes, n_bits, x.shape[-1])
    return np.einsum("...d,hbd->...hb", x, planes)


@np.errstate(invalid="ignore")  # infinity - infinity, in the rows that hold them
def hadamard_projections(x, parameters, n_bits, n_hashes):
    """Pseudo-random rotations H S G2 H G1 H G0 x (after Andoni et al. 2015).

    G rotates the planes (i, i + D/2), S are signs, others for each bit: no two bits of a
    code come from the same rotation. Row j % D of the rotations of group j // D makes hash j.
    """
    parameters = np.asarray(parameters, np.float64)
    columns = parameters.shape[-1]
    half = columns // 2
    signs = parameters[3:].reshape(-1, n_bits, columns)  # (group, bit, column)
    matrix = walsh_hadamard(columns)

    def hadamard(z):
        return (z.reshape(-1, columns) @ matrix).reshape(z.shape)

    def rotate_planes(z, angles):
        cosine, sine = angles[:half], angles[half:]
        upper, lower = z[..., :half], z[..., half:]
        return np.concatenate([cosine * upper - sine * lower, sine * upper + cosine * lower], -1)

    padded = np.zeros(x.shape[:-1] + (columns,))
    padded[..., : x.shape[-1]] = x
    z = rotate_planes(padded, parameters[0])
    z = rotate_planes(hadamard(z), parameters[1])
    z = rotate_planes(hadamard(z), parameters[2])
    z = hadamard(signs * z[..., None, None, :])  # (..., group, bit, column)
    by_hash = np.moveaxis(z, -2, -1)
    return by_hash.reshape(x.shape[:-1] + (-1, n_bits))[..., :n_hashes, :]


def projections(x, parameters, family, n_bits, n_hashes):
    """`(..., n, n_features)` to `(..., n, n_hashes, n_bits)`, whose signs are the codes' bits.

    family: "hyperplane" or "hadamard". parameters: one set `(rows, columns)` or `(1, rows,
    columns)`, or one for each head `(heads, rows, columns)` with x `(..., heads, n, n_features)`.
    """
    x, parameters = np.asarray(x, np.float64), np.asarray(parameters)
    if parameters.ndim == 3 and len(parameters) > 1:
        heads = [
            projections(x[..., head, :, :], parameters[head], family, n_bits, n_hashes)
            for head in range(len(parameters))
        ]
        return np.stack(heads, axis=-4)
    parameters = parameters.reshape(parameters.shape[-2:])
    project = {"hyperplane": hyperplane_projections, "hadamard": hadamard_projections}[family]
    return project(x, parameters, n_bits, n_hashes)


def codes(projected):
    """Bit b of a code is 1 where projection b is > 0, so zero and NaN give 0; its weight is 2^b."""
    n_bits = projected.shape[-1]
    weights = 2 ** np.arange(n_bits)
    return ((projected > 0) @ weights).astype(np.uint8 if n_bits <= 8 else np.uint16)


def hash(x, parameters, family, n_bits, n_hashes):
    """Codes `(..., n, n_hashes)`. See `projections` for the arguments."""
    return codes(projections(x, parameters, family, n_bits, n_hashes))


def unit(x):
    """Rows scaled to length 1; a row of zeros stays zero."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(-1, keepdims=True, initial=0)  # the squares of 1e200 would overflow
    x = np.divide(x, largest, out=np.zeros_like(x), where=largest != 0)
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, norm, out=np.zeros_like(x), where=norm != 0)


def lift(query, key, scale):
    """Unit rows of two more features with the inner products of query and key over the scale.

    [q, sqrt(scale - |q|^2), 0] / sqrt(scale) and [k, 0, sqrt(scale - |k|^2)] / sqrt(scale) for
    squared norms up to the scale (YOSO, appendix 1.1, after Neyshabur and Srebro 2015).
    """
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    rest = [np.sqrt(scale - (x**2).sum(-1, keepdims=True)) for x in (query, key)]
    lifted_query = np.concatenate([query, rest[0], np.zeros_like(rest[0])], -1)
    lifted_key = np.concatenate([key, np.zeros_like(rest[1]), rest[1]], -1)
    return lifted_query / np.sqrt(scale), lifted_key / np.sqrt(scale)


def cosine_probability(cosine, n_bits):
    """Probability that two unit vectors share a code: the expectation of B in eq. 2."""
    return (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** n_bits


def cosine_probability_slope(cosine, n_bits, floor):
    """Its derivative in the cosine (eq. 3), with 1 - cosine^2 floored: it is infinite at +-1."""
    cosine = np.clip(cosine, -1, 1)
    sine = np.sqrt(np.maximum(1 - cosine**2, floor))
    return n_bits * (1 - np.arccos(cosine) / np.pi) ** (n_bits - 1) / (np.pi * sine)


@np.errstate(invalid="ignore")
def collision_probability(x, y, n_bits):
    """For rows `(..., d)` of x and y, broadcast. A zero vector has no angle: NaN.

    The angle is 2 atan2(|u - v|, |u + v|) of the unit vectors (Kahan): acos would lose small ones.
    """
    x, y = unit(x), unit(y)
    difference = total = 0.0
    for u, v in zip(np.moveaxis(x, -1, 0), np.moveaxis(y, -1, 0), strict=True):
        # Feature by feature, so that all pairs of two sets take no memory for (pairs, d).
        difference, total = difference + (u - v) ** 2, total + (u + v) ** 2
    angle = 2 * np.arctan2(np.sqrt(difference), np.sqrt(total))
    return np.where(x.any(-1) & y.any(-1), (1 - angle / np.pi) ** n_bits, np.nan)


# ---------------------------------------------------------------- the sum verb


def collision_counts(query_codes, key_codes):
    """How many hashes collide: `(..., n_q, m)` and `(..., n_k, m)` to `(..., n_q, n_k)`."""
    return (query_codes[..., :, None, :] == key_codes[..., None, :, :]).sum(-1)


def visible(n_queries, n_keys, causal=False, key_mask=None):
    """The pairs that count, `(..., n_q, n_k)`: query i sees the keys j <= i when causal."""
    pairs = np.ones((n_queries, n_keys), bool)
    if causal:
        pairs = np.tril(pairs)
    return pairs if key_mask is None else pairs & (np.asarray(key_mask)[..., None, :] != 0)


@np.errstate(invalid="ignore")
def weighted_sum(weights, values):
    """weights @ values, where a zero weight means absent: 0 * NaN and 0 * infinity count as 0."""
    if np.isfinite(weights).all() and np.isfinite(values).all():
        return weights @ values
    terms = weights[..., :, :, None] * values[..., None, :, :]
    return np.where(weights[..., None] != 0, terms, 0).sum(-2)


def bucket_sum(query_codes, key_codes, values, *, causal=False, key_mask=None):
    """Mean over the hashes of the sum of the values whose key shares the query's bucket.

    Pair by pair: the count of a pair's collisions over m estimates its collision probability.
    """
    pairs = visible(query_codes.shape[-2], key_codes.shape[-2], causal, key_mask)
    counts = collision_counts(query_codes, key_codes) * pairs
    return weighted_sum(counts / query_codes.shape[-1], np.asarray(values, np.float64))


# ---------------------------------------------------------------- YOSO attention
# Both estimators are weights @ value (eq. 2), then a normalisation. The weights are the collision
# frequencies of m hashes (YOSO-m) or the collision probabilities (YOSO-E); the rest is the same.


@np.errstate(invalid="ignore")
def attention_forward(weights, value, normalize):
    """Raw sums normalised by "l2" (to unit rows), "sum" (of the weights) or None.

    A query whose raw sum is 0 (l2: of norm <= 1e-12) or that has no weight gives 0.
    """
    return weighted_sum(weights, value) * _inverse_scale(weights, value, normalize)


def _inverse_scale(weights, value, normalize):
    if normalize is None:
        return np.ones(weights.shape[:-1] + (1,))
    if normalize == "sum":
        scale = weights.sum(-1, keepdims=True)
        keep = scale > 0
    else:
        scale = np.linalg.norm(weighted_sum(weights, value), axis=-1, keepdims=True)
        keep = ~(scale <= 1e-12)  # NaN stays
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=keep)


@np.errstate(invalid="ignore")
def attention_backward(query, key, value, weights, slopes, normalize, grad_out):
    """Gradients of query, key and value. slopes: the derivatives of the weights in the cosines.

    With s_ij the derivative of the loss in weight ij, the unit rows get
    dq_i = sum_j slope_ij s_ij k_j and dk_j = sum_i slope_ij s_ij q_i (eq. 3 and 4).
    """
    inverse = _inverse_scale(weights, value, normalize)
    out = weighted_sum(weights, value) * inverse
    along = (grad_out * out).sum(-1, keepdims=True)
    if normalize == "l2":  # d(r / |r|) = (I - y y^T) dr / |r|
        grad_raw = (grad_out - along * out) * inverse
    else:
        grad_raw = grad_out * inverse
    grad_weights = grad_raw @ np.swapaxes(value, -1, -2)
    if normalize == "sum":  # y = sum_j w_j v_j / sum_j w_j, so dy/dw_j has - y / sum_j w_j
        grad_weights = grad_weights - along * inverse
    grad_cosine = np.where(slopes != 0, slopes * grad_weights, 0)
    return (
        _through_unit(query, weighted_sum(grad_cosine, unit(key))),
        _through_unit(key, weighted_sum(np.swapaxes(grad_cosine, -1, -2), unit(query))),
        weighted_sum(np.swapaxes(weights, -1, -2), grad_raw),
    )


def _through_unit(x, grad):
    """Gradient through u = x / |x|: (grad - (grad . u) u) / |x|, and 0 for a row of zeros."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    tangent = grad - (grad * unit(x)).sum(-1, keepdims=True) * unit(x)
    return np.divide(tangent, norm, out=np.zeros_like(tangent), where=norm != 0)


def _finite_rows(x):
    return np.isfinite(x).all(-1)


def _clean(x):
    """x in float64 with its NaN and infinite rows replaced by zeros."""
    x = np.asarray(x, np.float64)
    return np.where(_finite_rows(x)[..., None], x, 0)


def _attending(query, key, causal, key_mask):
    """Visible pairs of a finite query and a finite key."""
    pairs = visible(query.shape[-2], key.shape[-2], causal, key_mask)
    return pairs & _finite_rows(query)[..., :, None] & _finite_rows(key)[..., None, :]


def _sampled(query, key, query_codes, key_codes, causal, key_mask):
    counts = collision_counts(query_codes, key_codes)
    return _attending(query, key, causal, key_mask) * counts / query_codes.shape[-1]


def _expected(query, key, n_bits, causal, key_mask):
    cosine = unit(_clean(query)) @ np.swapaxes(unit(_clean(key)), -1, -2)
    pairs = _attending(query, key, causal, key_mask)
    return pairs * cosine_probability(cosine, n_bits), pairs, cosine


def _near(query, key, window, causal):
    """The pairs |i - j| < window, causal: 0 <= i - j < window."""
    distance = np.arange(query.shape[-2])[:, None] - np.arange(key.shape[-2])
    return (np.abs(distance) < window) & ((distance >= 0) | (not causal))


def _windowed(query, key, query_codes, key_codes, n_bits, window, causal, key_mask):
    """The sampled weights, with the probability itself where the pair is in the window."""
    weights = _sampled(query, key, query_codes, key_codes, causal, key_mask)
    if not window:
        return weights
    exact, _, _ = _expected(query, key, n_bits, causal, key_mask)
    return np.where(_near(query, key, window, causal), exact, weights)


def _forward(query, value, weights, normalize):
    out = attention_forward(weights, np.asarray(value, np.float64), normalize)
    return np.where(_finite_rows(query)[..., None], out, np.nan)


def _slopes(gradient, weights, pairs, cosine, n_bits, floor):
    if gradient == "lower_bound":  # eq. 4: dp/dx >= n_bits / 2 * p
        return n_bits / 2 * weights
    return pairs * cosine_probability_slope(cosine, n_bits, floor)


def _collided(gradient, weights, cosine, n_bits, n_hashes):
    """What the slopes of the pairs are multiplied by where only those that collide count."""
    if gradient == "collided":
        return weights > 0
    with np.errstate(divide="ignore"):  # p = 1
        misses = n_hashes * np.log1p(-cosine_probability(cosine, n_bits))
    seen = -np.expm1(misses)  # 1 - (1 - p)^n_hashes
    return np.divide(weights > 0, seen, out=np.zeros_like(cosine), where=seen > 0)


def _backward(query, key, value, weights, slopes, normalize, grad_out, key_mask):
    grad_out = np.where(_finite_rows(query)[..., None], np.asarray(grad_out, np.float64), 0)
    if key_mask is None:
        key_mask = np.ones(key.shape[-2], bool)
    takes_part = np.asarray(key_mask)[..., None] != 0
    value = np.where(takes_part, np.asarray(value, np.float64), 0)
    grad_query, grad_key, grad_value = attention_backward(
        _clean(query), _clean(key), value, weights, slopes, normalize, grad_out
    )
    grad_query = np.where(_finite_rows(query)[..., None], grad_query, np.nan)
    grad_key = np.where(takes_part & ~_finite_rows(key)[..., None], np.nan, grad_key)
    return grad_query, grad_key, grad_value


def yoso_forward(
    query,
    key,
    value,
    query_codes,
    key_codes,
    n_bits=None,
    *,
    causal=False,
    key_mask=None,
    normalize="l2",
    window=0,
):
    """YOSO-m (eq. 2) for given codes: `(..., n_q, d_v)`.

    A query with a NaN or infinity gives a NaN row, such a key takes no part. normalize: "l2",
    "sum" or None. key_mask: `(..., n_k)`, nonzero takes part. window: pairs of positions |i - j| <
    window have the collision probability of n_bits for their weight.
    """
    weights = _windowed(query, key, query_codes, key_codes, n_bits, window, causal, key_mask)
    return _forward(query, value, weights, normalize)


def yoso_backward(
    query,
    key,
    value,
    query_codes,
    key_codes,
    grad_out,
    n_bits,
    *,
    causal=False,
    key_mask=None,
    normalize="l2",
    gradient="lower_bound",
    floor=1e-6,
    window=0,
):
    """(grad_query, grad_key, grad_value) of `yoso_forward` for given codes.

    A code is a step function of its input, so the queries and keys get the gradient of the
    expectation: "lower_bound", n_bits/2 times the observed collision frequency (eq. 4);
    "expected", the exact slope of the probability (eq. 3) on every visible pair; "collided", that
    slope on the pairs that collide in some hash (*YOSO, appendix 1.4); or "unbiased", those over
    the probability 1 - (1 - p)^m that such a pair does (Horvitz and Thompson 1952).
    Pairs in the window have the slope that the word has in `expected_backward`.
    """
    weights = _windowed(query, key, query_codes, key_codes, n_bits, window, causal, key_mask)
    exact, pairs, cosine = _expected(query, key, n_bits, causal, key_mask)
    slopes = _slopes(gradient, weights, pairs, cosine, n_bits, floor)
    if gradient in ("collided", "unbiased"):
        n_hashes = query_codes.shape[-1]
        slopes = slopes * _collided(gradient, weights, cosine, n_bits, n_hashes)
    if window:
        kernel = "lower_bound" if gradient == "lower_bound" else "expected"
        in_window = _slopes(kernel, exact, pairs, cosine, n_bits, floor)
        slopes = np.where(_near(query, key, window, causal), in_window, slopes)
    return _backward(query, key, value, weights, slopes, normalize, grad_out, key_mask)


def expected_forward(query, key, value, n_bits, *, causal=False, key_mask=None, normalize="l2"):
    """YOSO-E, the expectation of eq. 2 over the hash functions; otherwise like `yoso_forward`."""
    weights, _, _ = _expected(query, key, n_bits, causal, key_mask)
    return _forward(query, value, weights, normalize)


def expected_backward(
    query,
    key,
    value,
    grad_out,
    n_bits,
    *,
    causal=False,
    key_mask=None,
    normalize="l2",
    gradient="lower_bound",
    floor=1e-12,
):
    """(grad_query, grad_key, grad_value) of `expected_forward`.

    Every gradient but "lower_bound" is the exact one: all pairs count, with their own weights.
    """
    weights, pairs, cosine = _expected(query, key, n_bits, causal, key_mask)
    slopes = _slopes(gradient, weights, pairs, cosine, n_bits, floor)
    return _backward(query, key, value, weights, slopes, normalize, grad_out, key_mask)
