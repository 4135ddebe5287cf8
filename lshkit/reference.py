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
    weights = np.uint64(1) << np.arange(n_bits, dtype=np.uint64)
    dtype = next(f"uint{size}" for size in (8, 16, 32, 64) if n_bits <= size)
    return ((projected > 0) * weights).sum(-1, dtype=np.uint64).astype(dtype)


def hash(x, parameters, family, n_bits, n_hashes):
    """Codes `(..., n, n_hashes)`. See `projections` for the arguments."""
    return codes(projections(x, parameters, family, n_bits, n_hashes))


def projection_bins(x, directions, shifts):
    """floor(a . x / w + b / w) of p-stable projections (Datar et al. 2004): `(..., n_hashes, k)`.

    directions: a / w `(n_hashes, k, n_features)`, shifts: b / w `(n_hashes, k)`.
    """
    return np.floor(np.einsum("...d,hbd->...hb", np.asarray(x, np.float64), directions) + shifts)


def feature_bins(x, scales, shifts):
    """The cell of every hash's grid (Rahimi and Recht 2007): `(..., n_hashes, n_features)`."""
    return np.floor(np.asarray(x, np.float64)[..., None, :] * scales + shifts)


def bin_codes(bins, multipliers):
    """32 bits of a hash of `(..., n_hashes, k)` bins: the sum of bin times multiplier, mixed.

    Both are taken modulo 2^32 and summed modulo 2^64; the mix is MurmurHash3's finaliser.
    """
    words = np.mod(bins, 2.0**32).astype(np.uint64)
    h = (words * multipliers.astype(np.uint64)).sum(-1, dtype=np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> np.uint64(33)) * np.uint64(factor)
    return ((h ^ h >> np.uint64(33)) >> np.uint64(32)).astype(np.uint32)


def unit_projections(x, parameters, family, n_bits, n_hashes):
    """`projections` of the rows' directions at unit variance: what soft codes are made of."""
    scale = np.shape(parameters)[-1] if family == "hadamard" else 1  # three transforms of D^(1/2)
    return projections(unit(x), parameters, family, n_bits, n_hashes) / scale


def soft_codes(projected, n_probes, sharpness):
    """The n_probes likely buckets of every hash: codes and weights `(..., n_hashes, n_probes)`.

    Probe a is the own code with the k-th of the bits of smallest |z| flipped where bit k of a is
    set. The weights are the softmax of the sum over all bits of log sigmoid(2 sharpness z bit),
    bit = +-1: flipping one adds -2 sharpness |z|.
    """
    flipped = np.arange(n_probes)[:, None] >> np.arange((n_probes - 1).bit_length()) & 1
    order = np.argsort(np.abs(projected), -1, kind="stable")[..., : flipped.shape[-1]]
    margins = np.take_along_axis(np.abs(projected), order, -1)
    own = codes(projected)[..., None]
    probes = own ^ (flipped << order[..., None, :]).sum(-1).astype(own.dtype)
    likelihood = np.exp(-2 * sharpness * (flipped * margins[..., None, :]).sum(-1))
    return probes, likelihood / likelihood.sum(-1, keepdims=True)


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


def bucket_sum(
    query_codes,
    key_codes,
    values,
    *,
    causal=False,
    key_mask=None,
    query_weights=None,
    key_weights=None,
):
    """Mean over the hashes of the sum of the values whose key shares the query's bucket.

    Pair by pair: the count of a pair's collisions over m estimates its collision probability. With
    weights, see `probe_weights`.
    """
    if query_weights is None and key_weights is None:
        pairs = visible(query_codes.shape[-2], key_codes.shape[-2], causal, key_mask)
        weights = collision_counts(query_codes, key_codes) / query_codes.shape[-1]
    else:
        query, key = as_probes(query_codes, query_weights), as_probes(key_codes, key_weights)
        pairs = visible(query[0].shape[-3], key[0].shape[-3], causal, key_mask)
        weights = probe_weights(*query, *key)
    return weighted_sum(weights * pairs, np.asarray(values, np.float64))


def as_probes(codes, weights):
    """Codes and weights `(..., n, m, t)`; codes without weights are single probes of weight 1."""
    if weights is None:
        return codes[..., None], np.ones(codes.shape + (1,))
    return codes, np.asarray(weights, np.float64)


def probe_weights(query_codes, query_weights, key_codes, key_weights):
    """`(..., n_q, m, t_q)` and `(..., n_k, m, t_k)` to weights of pairs `(..., n_q, n_k)`.

    The mean over the hashes of the product of both weights, summed over the shared buckets.
    """
    shared = query_codes[..., :, None, :, :, None] == key_codes[..., None, :, :, None, :]
    products = query_weights[..., :, None, :, :, None] * key_weights[..., None, :, :, None, :]
    return np.where(shared, products, 0).sum((-1, -2)).mean(-1)


# ---------------------------------------------------------------- the pairs verb


def collisions(query_codes, key_codes, *, causal=False, key_mask=None):
    """The colliding pairs of `(n_q, m)` and `(n_k, m)` codes in CSR form: indptr, indices, counts.

    Query i collides with the keys indices[indptr[i]:indptr[i + 1]], in counts[...] hashes.
    """
    pairs = visible(len(query_codes), len(key_codes), causal, key_mask)
    counts = collision_counts(query_codes, key_codes) * pairs
    _, indices = np.nonzero(counts)
    return np.append(0, np.cumsum((counts > 0).sum(-1))), indices, counts[counts > 0]


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
    grad_raw, bias = _grad_raw(value, weights, normalize, grad_out)
    grad_weights = grad_raw @ np.swapaxes(value, -1, -2) + bias
    grad_cosine = np.where(slopes != 0, slopes * grad_weights, 0)
    return (
        _through_unit(query, weighted_sum(grad_cosine, unit(key))),
        _through_unit(key, weighted_sum(np.swapaxes(grad_cosine, -1, -2), unit(query))),
        weighted_sum(np.swapaxes(weights, -1, -2), grad_raw),
    )


def _grad_raw(value, weights, normalize, grad_out):
    """g and b, for which the derivative of the loss in weight ij is g_i . v_j + b_i."""
    inverse = _inverse_scale(weights, value, normalize)
    out = weighted_sum(weights, value) * inverse
    along = (grad_out * out).sum(-1, keepdims=True)
    if normalize == "l2":  # d(r / |r|) = (I - y y^T) dr / |r|
        return (grad_out - along * out) * inverse, 0.0
    # y = sum_j w_j v_j / sum_j w_j, so dy/dw_j has - y / sum_j w_j
    return grad_out * inverse, -along * inverse if normalize == "sum" else 0.0


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


# ---------------------------------------------------------------- the lower bound's sketch


def rotation_matrix(parameters, n_values):
    """U = H G2 H G1 H G0 / D^1.5 without the columns beyond n_values, `(..., D, n_values)`.

    G rotates the planes (i, i + D/2). Rows u of a random U have E[u u^T] = 1 / D.
    """
    parameters = np.asarray(parameters, np.float64)
    columns = parameters.shape[-1]
    cosine, sine = np.split(parameters[..., None, :], 2, axis=-1)  # (..., 3, 1, D/2)
    z = np.eye(columns)[:n_values]
    for i in range(3):
        upper, lower = np.split(z, 2, axis=-1)
        c, s = cosine[..., i, :, :], sine[..., i, :, :]
        z = np.concatenate([c * upper - s * lower, s * upper + c * lower], -1)
        z = z @ walsh_hadamard(columns) / np.sqrt(columns)
    return np.swapaxes(z, -1, -2)


def sketched_backward(
    query,
    key,
    value,
    query_codes,
    key_codes,
    grad_out,
    n_bits,
    rotation,
    rank,
    *,
    causal=False,
    key_mask=None,
    normalize="l2",
):
    """(grad_query, grad_key) of `yoso_backward`'s lower bound from `rank` coordinates a hash.

    In hash h, g_i . v_j is (D / R) sum_r (U g_i)_r (U v_j)_r over one of the C = ceil(D / R) groups
    of coordinates, the C h / n_hashes-th: R in turn, the last group going on at the first
    coordinate. Finite rows only.
    rotation: U, `(..., D, n_values)`.
    """
    weights = _sampled(query, key, query_codes, key_codes, causal, key_mask)
    pairs = _attending(query, key, causal, key_mask)
    grad_raw, bias = _grad_raw(np.asarray(value, np.float64), weights, normalize, grad_out)
    g, v = (x @ np.swapaxes(rotation, -1, -2) for x in (grad_raw, value))
    n_hashes, columns = query_codes.shape[-1], rotation.shape[-2]
    grad_cosine = 0
    for h in range(n_hashes):
        group = (h * -(-columns // rank) // n_hashes * rank + np.arange(rank)) % columns
        products = g[..., group] @ np.swapaxes(v[..., group], -1, -2) * columns / rank + bias
        collide = query_codes[..., :, None, h] == key_codes[..., None, :, h]
        grad_cosine = grad_cosine + n_bits / 2 / n_hashes * (pairs & collide) * products
    return (
        _through_unit(query, grad_cosine @ unit(key)),
        _through_unit(key, np.swapaxes(grad_cosine, -1, -2) @ unit(query)),
    )


# ---------------------------------------------------------------- attention with soft codes


def _soft_side(x, hasher, n_probes, sharpness):
    """Projections of the finite rows, their probes and the weights of these."""
    projected = unit_projections(_clean(x), *hasher)
    return projected, *soft_codes(projected, n_probes, sharpness)


def soft_attention_forward(
    query,
    key,
    value,
    hasher,
    n_probes=(4, 4),
    sharpness=2.0,
    *,
    causal=False,
    key_mask=None,
    normalize="l2",
):
    """Attention whose weights are those of `probe_weights`: `(..., n_q, d_v)`.

    hasher: (parameters, family, n_bits, n_hashes). n_probes: of queries and keys. sharpness: a
    number, or an array that broadcasts with `(..., n, n_hashes, n_probes)`.
    """
    query_side, key_side = (
        _soft_side(x, hasher, t, sharpness) for x, t in zip((query, key), n_probes, strict=True)
    )
    pairs = _attending(query, key, causal, key_mask)
    return _forward(query, value, pairs * probe_weights(*query_side[1:], *key_side[1:]), normalize)


@np.errstate(invalid="ignore")
def soft_attention_backward(
    query,
    key,
    value,
    hasher,
    grad_out,
    n_probes=(4, 4),
    sharpness=2.0,
    *,
    causal=False,
    key_mask=None,
    normalize="l2",
):
    """(grad_query, grad_key, grad_value, grad_sharpness) of `soft_attention_forward`.

    Exact where the selected bits do not change. grad_sharpness: for every head, `(...)`.
    """
    sides = [
        _soft_side(x, hasher, t, sharpness) for x, t in zip((query, key), n_probes, strict=True)
    ]
    pairs = _attending(query, key, causal, key_mask)
    weights = pairs * probe_weights(*sides[0][1:], *sides[1][1:])
    value = np.asarray(value, np.float64)
    if key_mask is not None:
        value = np.where(np.asarray(key_mask)[..., None] != 0, value, 0)
    grad_out = np.where(_finite_rows(query)[..., None], np.asarray(grad_out, np.float64), 0)

    inverse = _inverse_scale(weights, value, normalize)
    out = weighted_sum(weights, value) * inverse
    along = (grad_out * out).sum(-1, keepdims=True)
    grad_raw = (grad_out - along * out if normalize == "l2" else grad_out) * inverse
    grad_pairs = grad_raw @ np.swapaxes(value, -1, -2)
    if normalize == "sum":
        grad_pairs = grad_pairs - along * inverse
    grad_pairs = np.where(pairs, grad_pairs, 0)
    grads, grad_sharpness = [], 0.0
    for x, side, other, grad in (
        (query, sides[0], sides[1], grad_pairs),
        (key, sides[1], sides[0], np.swapaxes(grad_pairs, -1, -2)),
    ):
        # d pair_ij / d weight_iha is the mean of what the other side's row has in the bucket
        shared = side[1][..., :, None, :, :, None] == other[1][..., None, :, :, None, :]
        met = np.where(shared, other[2][..., None, :, :, None, :], 0).sum(-1)
        grad_weights = (grad[..., None, None] * met).sum(-3) / side[1].shape[-2]
        grad_x, grad_beta = _soft_backward(x, side, grad_weights, hasher, sharpness)
        grads.append(grad_x)
        grad_sharpness = grad_sharpness + grad_beta
    if key_mask is not None:
        grads[1] = np.where(np.asarray(key_mask)[..., None] != 0, grads[1], 0)
    grad_value = weighted_sum(np.swapaxes(weights, -1, -2), grad_raw)
    return *grads, grad_value, grad_sharpness


def _soft_backward(x, side, grad_weights, hasher, sharpness):
    """From the gradient of the weights of probes to those of x and, summed over it, sharpness."""
    projected, _, weights = side
    n_probes = weights.shape[-1]
    flipped = np.arange(n_probes)[:, None] >> np.arange((n_probes - 1).bit_length()) & 1
    order = np.argsort(np.abs(projected), -1, kind="stable")[..., : flipped.shape[-1]]
    selected = np.take_along_axis(projected, order, -1)
    grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdims=True))
    grad_flips = -2 * grad_logits @ flipped  # of sharpness * margin
    grad_sharpness = (grad_flips * np.abs(selected)).sum((-1, -2, -3))
    grad_projected = np.zeros_like(projected)
    np.put_along_axis(grad_projected, order, sharpness * np.sign(selected) * grad_flips, -1)
    # The projections are linear: those of the axes are their matrix.
    axes = np.broadcast_to(np.eye(x.shape[-1]), (*x.shape[:-2], x.shape[-1], x.shape[-1]))
    matrix = unit_projections(axes, *hasher)
    grad = _through_unit(_clean(x), np.einsum("...nhb,...dhb->...nd", grad_projected, matrix))
    return np.where(_finite_rows(x)[..., None], grad, np.nan), grad_sharpness


# ---------------------------------------------------------------- the draw verb


def random_words(seed, streams, n):
    """n random 64-bit words for each stream number: a uint64 array `(..., n)`.

    SplitMix64 (Steele, Lea, Flood 2014), started for each stream at a mixed counter: word t of a
    stream is known without the others, so no result depends on who computes it.
    """

    def mix(z):  # a bijection of 64-bit words
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    step = np.uint64(0x9E3779B97F4A7C15)
    streams = np.asarray(streams, np.uint64) + np.uint64(1)
    start = mix(mix(np.asarray([seed], np.uint64)) + streams * step)
    return mix(start[..., None] + np.arange(1, n + 1, dtype=np.uint64) * step)


def below(words, bounds):
    """Uniform integers from 0 to bounds - 1: the high half of the 128-bit product word * bound."""
    words = np.asarray(words, np.uint64)
    bounds = np.broadcast_to(np.asarray(bounds, np.uint64), words.shape)
    high = [int(w) * int(b) >> 64 for w, b in zip(words.ravel(), bounds.ravel(), strict=True)]
    return np.array(high, np.int64).reshape(words.shape)


def draw(query_codes, key_codes, n_samples=None, weights=None, seed=0):
    """Members of the queries' buckets and the probability of each draw, given its table.

    Sample t of query i comes from table (offset_i + t) mod m, offset_i uniform; without n_samples
    there is one from each table in order. Member j of the bucket is drawn with probability
    1 / size, or weight_j / sum of the bucket's weights. Nothing to draw: -1 with probability 0.
    """
    query_codes, key_codes = np.asarray(query_codes), np.asarray(key_codes)
    n_queries, m = query_codes.shape
    samples = m if n_samples is None else n_samples
    words = random_words(seed, np.arange(n_queries), samples + 1)  # word 0 gives the offset
    offset = below(words[:, 0], m) if n_samples is not None else np.zeros(n_queries, np.int64)
    tables = ((offset[:, None] + np.arange(samples)) % m).astype(np.int32)
    indices = np.full((n_queries, samples), -1, np.int64)
    probabilities = np.zeros((n_queries, samples))
    for i, t in np.ndindex(indices.shape):
        h = tables[i, t]
        members = np.flatnonzero(key_codes[:, h] == query_codes[i, h])
        if weights is None and len(members):
            indices[i, t] = members[below(words[i, t + 1], len(members))]
            probabilities[i, t] = 1 / len(members)
        elif weights is not None and np.sum(weights[members]) > 0:
            sums = np.cumsum(weights[members])
            point = float(words[i, t + 1] >> np.uint64(11)) * 2.0**-53 * sums[-1]
            j = members[np.searchsorted(sums, point, side="right")]
            indices[i, t], probabilities[i, t] = j, weights[j] / sums[-1]
    return indices, probabilities, tables


def log_kernel(kernel, queries, rows, bandwidth=1.0, n_bits=8):
    """log of the density kernels of lshkit.kde for all pairs `(n_q, n)`; -inf where one is 0."""
    queries, rows = (np.asarray(x, np.float64) / bandwidth for x in (queries, rows))
    difference = queries[:, None] - rows
    if kernel == "laplacian":
        return -np.abs(difference).sum(-1)
    if kernel == "angular":
        unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, rows)]
        half = np.linalg.norm(unit[0][:, None] - unit[1], axis=-1) / 2
        angle = 2 * np.arcsin(np.minimum(half, 1))
        with np.errstate(divide="ignore"):
            return n_bits * np.log(np.maximum(1 - angle / np.pi, 0))
    r = np.sqrt((difference**2).sum(-1))
    if kernel == "gaussian":
        return -0.5 * r**2
    if kernel == "exponential":
        return -r
    values = {
        "tophat": np.ones_like(r),
        "epanechnikov": 1 - r**2,
        "linear": 1 - r,
        "cosine": np.cos(np.pi / 2 * r),
    }[kernel]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(r < 1, np.log(np.where(r < 1, values, 1)), -np.inf)


def kernel_sums(kernel, queries, rows, bandwidth=1.0, n_bits=8, weights=None):
    """Sums over the rows of weight * k, and of its square, for each query: two `(n_q,)` arrays."""
    values = np.exp(log_kernel(kernel, queries, rows, bandwidth, n_bits))
    terms = values if weights is None else values * weights
    return terms.sum(axis=1), (terms**2).sum(axis=1)


def near_far_sums(queries, rows, bias, row_codes, probes, min_count, sample):
    """Sums of exp(query . row + bias) over near rows, and over sampled rows that are not near.

    A row is near when its codes `(n, n_hashes)` are among the query's probes
    `(n_q, n_hashes, n_probes)` in min_count hashes. Returns, `(n_q, 6)` in float64: the largest of
    these exponents, the two sums relative to it, the sum of the squares of the second's terms, and
    both numbers of rows.
    """
    logits = np.asarray(queries, np.float64) @ np.asarray(rows, np.float64).T
    logits = logits if bias is None else logits + bias
    met = [(row_codes[:, :, None] == p[None]).any(2).sum(1) >= min_count for p in probes]
    out = np.zeros((len(logits), 6))
    for i, (line, near) in enumerate(zip(logits, met, strict=True)):
        far = np.zeros(len(near), bool)
        far[sample] = True
        far &= ~near
        largest = line[near | far].max(initial=-np.inf)
        near_terms, far_terms = np.exp(line[near] - largest), np.exp(line[far] - largest)
        sums = near_terms.sum(), far_terms.sum(), (far_terms**2).sum()
        out[i] = largest, *sums, near.sum(), far.sum()
    return out
