"""Hash families: projections, codes and collision probabilities.

Sources: Charikar (2002) for random hyperplanes; Andoni et al. (2015) for the fast Hadamard
rotations; Datar et al. (2004) for p-stable projections; Rahimi and Recht (2007) for random binning.
"""

import numpy as np


def walsh_hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix in natural order, unnormalised: H[i, j] = (-1)^popcount(i & j)."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix


def random_parameters(
    family: str, n_features: int, n_bits: int, n_hashes: int, n_sets: int, seed: int
) -> np.ndarray:
    """The float32 numbers that make hash functions, `(n_sets, rows, columns)` as hash.hpp says.

    Each word of Philox 4x64 (Salmon et al., SC 2011) makes two normals (Box and Muller 1958), two
    angles or 64 signs. Cosines and sines are the nearest floats.
    """
    normal = family == "hyperplane"
    rows, columns = n_hashes * n_bits, n_features
    if not normal:
        columns = 64
        while columns < n_features:
            columns *= 2
        rows = 3 + -(-n_hashes // columns) * n_bits
    half = columns // 2
    angle_words, sign_words = 3 * half // 2, (rows - 3) * columns // 64
    words = -(-rows * columns // 2) if normal else angle_words + sign_words
    drawn = np.random.Philox(key=seed).random_raw(n_sets * words).reshape(n_sets, words)

    def angles(bits: np.ndarray) -> np.ndarray:
        return (bits.astype(np.float32) * np.float32(2 * np.pi / 2**32)).astype(np.float64)

    if normal:
        pairs = drawn.view(np.uint32).reshape(n_sets, words, 2)
        radii = np.sqrt(-2 * np.log((pairs[..., :1] + 0.5) / 2**32)).astype(np.float32)
        turned = angles(pairs[..., 1])
        units = np.stack((np.cos(turned), np.sin(turned)), -1).astype(np.float32)
        numbers = (radii * units).reshape(n_sets, 2 * words)[:, : rows * columns]
        return numbers.reshape(n_sets, rows, columns)
    turned = angles(drawn[:, :angle_words].view(np.uint32)).reshape(n_sets, 3, half)
    rotations = np.concatenate((np.cos(turned), np.sin(turned)), -1).astype(np.float32)
    bits = np.unpackbits(drawn[:, angle_words:].view(np.uint8), axis=1, bitorder="little")
    signs = 1 - 2 * bits.astype(np.float32).reshape(n_sets, rows - 3, columns)
    return np.concatenate((rotations, signs), 1)


@np.errstate(invalid="ignore")  # infinity - infinity, in the rows that hold them
def hyperplane_projections(
    x: np.ndarray, parameters: np.ndarray, n_bits: int, n_hashes: int
) -> np.ndarray:
    """Dot products with random normals (Charikar 2002): row j * n_bits + b is bit b of hash j."""
    planes = np.asarray(parameters, np.float64).reshape(n_hashes, n_bits, x.shape[-1])
    return np.einsum("...d,hbd->...hb", x, planes)


def permuted_columns(columns: int, n_bits: int) -> np.ndarray:
    """Which columns bit b's H sees in which order, `(n_bits, columns)`.

    Those of every eight that lie together, by the b-th power of a matrix of order 7 over GF(2) on
    the three low bits of their numbers. It is symmetric, so that the rows of H are permuted too.
    """
    matrix = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 1]])
    low = (np.arange(8)[:, None] >> np.arange(3)) & 1
    orders = []
    for _ in range(n_bits):
        eight = low @ [1, 2, 4]
        orders.append((np.arange(0, columns, 8)[:, None] + eight).ravel())
        low = low @ matrix % 2
    return np.array(orders)


@np.errstate(invalid="ignore")  # infinity - infinity, in the rows that hold them
def hadamard_projections(
    x: np.ndarray, parameters: np.ndarray, n_bits: int, n_hashes: int
) -> np.ndarray:
    """Pseudo-random rotations H P S G2 H G1 H G0 x (after Andoni et al. 2015).

    G rotates the planes (i, i + D/2), S are signs, others for each bit: no two bits of a
    code come from the same rotation. P permutes columns, for each bit otherwise. Row j % D of the
    rotations of group j // D makes hash j.
    """
    parameters = np.asarray(parameters, np.float64)
    columns = parameters.shape[-1]
    half = columns // 2
    signs = parameters[3:].reshape(-1, n_bits, columns)  # (group, bit, column)
    matrix = walsh_hadamard(columns)

    def hadamard(z: np.ndarray) -> np.ndarray:
        return (z.reshape(-1, columns) @ matrix).reshape(z.shape)

    def rotate_planes(z: np.ndarray, angles: np.ndarray) -> np.ndarray:
        cosine, sine = angles[:half], angles[half:]
        upper, lower = z[..., :half], z[..., half:]
        return np.concatenate([cosine * upper - sine * lower, sine * upper + cosine * lower], -1)

    padded = np.zeros(x.shape[:-1] + (columns,))
    padded[..., : x.shape[-1]] = x
    z = rotate_planes(padded, parameters[0])
    z = rotate_planes(hadamard(z), parameters[1])
    z = rotate_planes(hadamard(z), parameters[2])
    z = signs * z[..., None, None, :]  # (..., group, bit, column)
    z = np.take_along_axis(z, permuted_columns(columns, n_bits)[(None,) * (z.ndim - 2)], -1)
    z = hadamard(z)
    by_hash = np.moveaxis(z, -2, -1)
    return by_hash.reshape(x.shape[:-1] + (-1, n_bits))[..., :n_hashes, :]


def projections(
    x: np.ndarray, parameters: np.ndarray, family: str, n_bits: int, n_hashes: int
) -> np.ndarray:
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


def codes(projected: np.ndarray) -> np.ndarray:
    """Bit b of a code is 1 where projection b is > 0, so zero and NaN give 0; its weight is 2^b."""
    n_bits = projected.shape[-1]
    weights = np.uint64(1) << np.arange(n_bits, dtype=np.uint64)
    dtype = next(f"uint{size}" for size in (8, 16, 32, 64) if n_bits <= size)
    return ((projected > 0) * weights).sum(-1, dtype=np.uint64).astype(dtype)


def hash(
    x: np.ndarray, parameters: np.ndarray, family: str, n_bits: int, n_hashes: int
) -> np.ndarray:
    """Codes `(..., n, n_hashes)`. See `projections` for the arguments."""
    return codes(projections(x, parameters, family, n_bits, n_hashes))


def projection_bins(x: np.ndarray, directions: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """floor(a . x / w + b / w) of p-stable projections (Datar et al. 2004): `(..., n_hashes, k)`.

    directions: a / w `(n_hashes, k, n_features)`, shifts: b / w `(n_hashes, k)`.
    """
    return np.floor(np.einsum("...d,hbd->...hb", np.asarray(x, np.float64), directions) + shifts)


def feature_bins(x: np.ndarray, scales: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """The cell of every hash's grid (Rahimi and Recht 2007): `(..., n_hashes, n_features)`."""
    return np.floor(np.asarray(x, np.float64)[..., None, :] * scales + shifts)


def bin_codes(bins: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    """32 bits of a hash of `(..., n_hashes, k)` bins: the sum of bin times multiplier, mixed.

    Both are taken modulo 2^32 and summed modulo 2^64; the mix is MurmurHash3's finaliser.
    """
    words = np.mod(bins, 2.0**32).astype(np.uint64)
    h = (words * multipliers.astype(np.uint64)).sum(-1, dtype=np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h = (h ^ h >> np.uint64(33)) * np.uint64(factor)
    return ((h ^ h >> np.uint64(33)) >> np.uint64(32)).astype(np.uint32)


def unit_projections(
    x: np.ndarray, parameters: np.ndarray, family: str, n_bits: int, n_hashes: int
) -> np.ndarray:
    """`projections` of the rows' directions at unit variance: what soft codes are made of."""
    scale = np.shape(parameters)[-1] if family == "hadamard" else 1  # three transforms of D^(1/2)
    return projections(unit(x), parameters, family, n_bits, n_hashes) / scale


def soft_codes(
    projected: np.ndarray, n_probes: int, sharpness: float | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
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


def unit(x: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1; a row of zeros stays zero."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(-1, keepdims=True, initial=0)  # the squares of 1e200 would overflow
    x = np.divide(x, largest, out=np.zeros_like(x), where=largest != 0)
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, norm, out=np.zeros_like(x), where=norm != 0)


def lift(query: np.ndarray, key: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows of two more features with the inner products of query and key over the scale.

    [q, sqrt(scale - |q|^2), 0] / sqrt(scale) and [k, 0, sqrt(scale - |k|^2)] / sqrt(scale) for
    squared norms up to the scale (YOSO, appendix 1.1, after Neyshabur and Srebro 2015).
    """
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    rest = [np.sqrt(scale - (x**2).sum(-1, keepdims=True)) for x in (query, key)]
    lifted_query = np.concatenate([query, rest[0], np.zeros_like(rest[0])], -1)
    lifted_key = np.concatenate([key, np.zeros_like(rest[1]), rest[1]], -1)
    return lifted_query / np.sqrt(scale), lifted_key / np.sqrt(scale)


def cosine_probability(cosine: np.ndarray, n_bits: int) -> np.ndarray:
    """Probability that two unit vectors share a code: the expectation of B in eq. 2."""
    return (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** n_bits


def cosine_probability_slope(cosine: np.ndarray, n_bits: int, floor: float) -> np.ndarray:
    """Its derivative in the cosine (eq. 3), with 1 - cosine^2 floored: it is infinite at +-1."""
    cosine = np.clip(cosine, -1, 1)
    sine = np.sqrt(np.maximum(1 - cosine**2, floor))
    return n_bits * (1 - np.arccos(cosine) / np.pi) ** (n_bits - 1) / (np.pi * sine)


@np.errstate(invalid="ignore")
def collision_probability(x: np.ndarray, y: np.ndarray, n_bits: int) -> np.ndarray:
    """For rows `(..., d)` of x and y, broadcast. A zero vector has no angle: NaN."""
    return (1 - angle(x, y) / np.pi) ** n_bits


def angle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of rows `(..., d)` of x and y, broadcast; NaN for a zero vector.

    2 atan2(|u - v|, |u + v|) of the unit vectors (Kahan): acos would lose small ones.
    """
    x, y = unit(x), unit(y)
    difference = total = 0.0
    for u, v in zip(np.moveaxis(x, -1, 0), np.moveaxis(y, -1, 0), strict=True):
        # Feature by feature, so that all pairs of two sets take no memory for (pairs, d).
        difference, total = difference + (u - v) ** 2, total + (u + v) ** 2
    angle = 2 * np.arctan2(np.sqrt(difference), np.sqrt(total))
    return np.where(x.any(-1) & y.any(-1), angle, np.nan)
