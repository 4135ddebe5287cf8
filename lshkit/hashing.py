"""Locality-sensitive hash families: codes = hasher.hash(x).

Two vectors share a code with a probability that depends only on their angle. A family knows that
probability; what is done with codes is the business of the verbs in `lshkit.buckets`.
"""

import numpy as np

from lshkit import _C, checks, reference

FAMILY = {"hyperplane": 0, "hadamard": 1}  # lshkit::Family of the C++ core
MAX_BITS = 16
MAX_HASHES = 2**16 - 1  # the core counts the collisions of a pair in 16 bits
ANGLE_ROWS = 3  # of FastHadamard's parameters, before the signs

# Row i: the eight bits of i as signs. One look-up turns a random byte into eight of them.
_BYTE_SIGNS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, -1, 1).astype(np.float32)


def make_parameters(family, n_features, n_bits, n_hashes, n_sets=1, seed=None):
    """The random numbers that make `n_sets` independent hash function sets.

    Returns a float32 array `(n_sets,) + parameter_shape(...)` in the layout of the core (hash.hpp).
    Set 0 of several equals the only set of one with the same seed. seed: None, an int or a
    `numpy.random.Generator`. Nothing is checked here: `Hyperplane` and `FastHadamard` do that.
    """
    rows, columns = parameter_shape(family, n_features, n_bits, n_hashes)
    if family == "hyperplane":
        rng = np.random.default_rng(seed)
        return rng.standard_normal((n_sets, rows, columns), dtype=np.float32)
    # Raw words, 32 bits for each angle and one for each sign, straight from a counter: attention
    # draws new functions in every training step, and a Generator would take twice as long.
    if not isinstance(seed, (int, np.integer)):
        seed = int(np.random.default_rng(seed).integers(2**63))
    half = columns // 2
    angle_words = ANGLE_ROWS * half // 2
    words = angle_words + (rows - ANGLE_ROWS) * columns // 64
    bits = np.random.Philox(key=seed).random_raw(n_sets * words).reshape(n_sets, words)
    angles = bits[:, :angle_words].view(np.uint32).astype(np.float32)
    angles *= np.float32(2 * np.pi / 2**32)
    angles = angles.reshape(n_sets, ANGLE_ROWS, half)
    parameters = np.empty((n_sets, rows, columns), np.float32)
    np.cos(angles, out=parameters[:, :ANGLE_ROWS, :half])
    np.sin(angles, out=parameters[:, :ANGLE_ROWS, half:])
    signs = _BYTE_SIGNS.take(bits[:, angle_words:].view(np.uint8), axis=0)
    parameters[:, ANGLE_ROWS:] = signs.reshape(n_sets, rows - ANGLE_ROWS, columns)
    return parameters


def parameter_shape(family, n_features, n_bits, n_hashes):
    """(rows, columns) of one hash function set."""
    if family == "hyperplane":
        return n_hashes * n_bits, n_features
    columns = max(64, 1 << (n_features - 1).bit_length())
    groups = -(-n_hashes // columns)
    return ANGLE_ROWS + groups * n_bits, columns


def code_dtype(n_buckets):
    """The smallest unsigned numpy dtype that holds the codes 0 .. n_buckets - 1."""
    return np.dtype(np.uint8 if n_buckets <= 256 else np.uint16)


def _sharpness_tensor(sharpness, torch):
    """A number, or a tensor of one, as the operators take it: `(1,)`. They check its value."""
    if not isinstance(sharpness, torch.Tensor):
        return torch.tensor([checks.positive("sharpness", sharpness)])
    sharpness = checks.array("sharpness", sharpness, torch, kinds="f", wanted="a real number")
    if sharpness.numel() != 1:
        shape = tuple(sharpness.shape)
        raise ValueError(f"sharpness must be one number, got a tensor of shape {shape}")
    return sharpness.reshape(1)


class _AngularFamily:
    """What the families of the angle share: codes of n_bits signs of random projections."""

    family: str  # the key of FAMILY

    def __init__(self, n_features, n_bits, n_hashes, *, seed=None):
        self.n_features = checks.integer("n_features", n_features, 1)
        self.n_bits = checks.integer("n_bits", n_bits, 1, MAX_BITS)
        self.n_hashes = checks.integer("n_hashes", n_hashes, 1, MAX_HASHES)
        if not (seed is None or isinstance(seed, np.random.Generator)):
            seed = checks.integer("seed", seed, 0)
        self.seed = seed
        self.parameters = make_parameters(
            self.family, self.n_features, self.n_bits, self.n_hashes, 1, seed
        )

    @property
    def n_buckets(self):
        """Number of different codes, 2^n_bits."""
        return 2**self.n_bits

    def hash(self, x):
        """Codes of the rows of x.

        Parameters
        ----------
        x : array or tensor `(..., n_features)`
            Real numbers of any type, hashed in float32. Only a row's direction matters, as long as
            its projections stay within float32: for lengths from about 1e-30 to 1e34.

        Returns
        -------
        codes : array or tensor `(..., n_hashes)`, like x
            uint8 when n_bits <= 8, else uint16. Bit b of a code (of weight 2^b) is 1 where its
            projection is > 0. A row of zeros, which has no direction, has code 0 in every hash.
            A row with a NaN or infinity has codes without a meaning; other rows keep theirs.
        """
        torch = checks.torch_of(x=x)
        x = self._rows("x", x, torch)
        shape = tuple(x.shape[:-1]) + (self.n_hashes,)
        options = FAMILY[self.family], self.n_bits, self.n_hashes
        if torch is not None:
            from lshkit import torch_ops

            x = x.reshape(1, 1, -1, self.n_features)
            return torch_ops.hash(x, torch.from_numpy(self.parameters), *options).reshape(shape)
        codes = np.empty(shape, code_dtype(self.n_buckets))
        if codes.size:
            with np.errstate(over="ignore"):  # beyond float32 is infinity
                x = np.ascontiguousarray(x, np.float32).reshape(1, 1, -1, self.n_features)
            _C.hash(x, self.parameters, *options, codes.reshape(1, 1, -1, self.n_hashes), 0)
        return codes

    def soft_hash(self, x, n_probes, sharpness):
        """The n_probes most likely buckets of every row and hash, with weights that sum to 1.

        With z the projections of x / |x| at unit variance, bucket c has the likelihood
        prod_b sigmoid(2 sharpness z_b c_b), c_b = +-1 its bits (RACE's soft bucket). Probe 0 is the
        code of `hash`; probe a has the k-th of the bits of smallest |z| flipped where bit k of
        a is set. For n_probes <= 3 these are the most likely buckets, for 2^n_bits all of them; in
        between, the likeliest of the choices that flip the same few bits in every way.

        Parameters
        ----------
        x : array or tensor `(..., n_features)`
            Real numbers of any type, used in float32. Only a row's direction matters.
        n_probes : int, 1 to 2^n_bits
        sharpness : float > 0, or in torch a tensor of one such number
            How fast the weight of a bucket falls with the margins |z|; 2 and more for few probes.

        Returns
        -------
        codes : array or tensor `(..., n_hashes, n_probes)`
            uint8 when n_bits <= 8, else uint16.
        weights : float32 array or tensor `(..., n_hashes, n_probes)`
            The softmax of the log-likelihoods over the probes; exactly 1 for n_probes=1. In torch
            differentiable in x and sharpness, exactly but for the choice of bits, which is
            piecewise constant. A row of zeros weighs all its probes alike and has no gradient; one
            with a NaN or infinity has weights and a gradient of NaN.
        """
        torch = checks.torch_of(x=x)
        x = self._rows("x", x, torch)
        n_probes = checks.integer("n_probes", n_probes, 1, self.n_buckets)
        options = FAMILY[self.family], self.n_bits, self.n_hashes, n_probes
        shape = tuple(x.shape[:-1]) + (self.n_hashes, n_probes)
        if torch is not None:
            from lshkit import torch_ops

            sharpness = _sharpness_tensor(sharpness, torch)
            x = x.reshape(1, 1, -1, self.n_features)
            parameters = torch.from_numpy(self.parameters)
            probes, weights, *_ = torch_ops.soft_hash(x, parameters, sharpness, *options)
            return probes.reshape(shape), weights.reshape(shape)
        sharpness = np.full(1, checks.positive("sharpness", sharpness), np.float32)
        probes, weights = np.empty(shape, code_dtype(self.n_buckets)), np.empty(shape, np.float32)
        if probes.size:
            with np.errstate(over="ignore"):  # beyond float32 is infinity
                x = np.ascontiguousarray(x, np.float32).reshape(1, 1, -1, self.n_features)
            rows, n_selected = (1, 1, x.shape[2]), self.n_hashes * (n_probes - 1).bit_length()
            _C.soft_hash(
                *(x, self.parameters, sharpness, *options),
                np.empty((*rows, self.n_hashes), probes.dtype),
                np.empty((*rows, n_selected), np.uint8),
                np.empty((*rows, n_selected), np.float32),
                *(probes.reshape(*rows, -1), weights.reshape(*rows, -1), 0),
            )
        return probes, weights

    def collision_probability(self, x, y):
        """Probability that rows of x and y share a code, over the choice of the hash functions.

        (1 - angle / pi)^n_bits (Charikar 2002), in float64 and for rows of any length. Accurate at
        small angles too: exactly 1 for a row and itself.

        Parameters
        ----------
        x, y : arrays or tensors `(..., n_features)`
            The leading dimensions are broadcast: `x[:, None]`, `y[None]` gives all pairs.

        Returns
        -------
        probability : float64 array or tensor `(...)`
            NaN where x or y is a row of zeros or not finite. Not differentiable.
        """
        torch = checks.torch_of(x=x, y=y)
        x, y = self._rows("x", x, torch), self._rows("y", y, torch)
        if torch is not None:
            x, y = (z.detach().to(torch.float64).numpy() for z in (x, y))
        try:
            np.broadcast_shapes(x.shape[:-1], y.shape[:-1])
        except ValueError:
            shapes = f"x {x.shape} and y {y.shape}"
            raise ValueError(f"the leading dimensions of {shapes} do not broadcast") from None
        probability = reference.collision_probability(x, y, self.n_bits)
        return probability if torch is None else torch.from_numpy(np.asarray(probability))

    def _rows(self, name, x, torch):
        x = checks.array(name, x, torch)
        if x.ndim == 0 or x.shape[-1] != self.n_features:
            wanted = f"(..., {self.n_features}), the last dimension being n_features"
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")
        return x

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return self._sizes() == other._sizes() and np.array_equal(self.parameters, other.parameters)

    def __hash__(self):
        return hash((type(self), self._sizes(), self.parameters[0, -1].tobytes()))

    def _sizes(self):
        return self.n_features, self.n_bits, self.n_hashes

    def __repr__(self):
        name, seed = type(self).__name__, self.seed
        return f"{name}({self.n_features}, {self.n_bits}, {self.n_hashes}, seed={seed!r})"


class Hyperplane(_AngularFamily):
    """Signs of projections on random Gaussian directions (Charikar 2002).

    Exact for any vectors, at O(n_features n_bits n_hashes) a row; `FastHadamard` is faster.

    Parameters
    ----------
    n_features : int >= 1
        Length of the vectors.
    n_bits : int, 1 to 16
        Bits of a code (tau in the YOSO paper): more make a sharper kernel.
    n_hashes : int, 1 to 65535
        Number of independent codes a vector gets (m in the YOSO paper): more give less noise.
    seed : None, int >= 0 or numpy.random.Generator
        The same integer always gives the same hash functions.

    Attributes
    ----------
    n_buckets : int
        2^n_bits.
    parameters : float32 array `(1, n_hashes * n_bits, n_features)`
        All the random numbers, as the core takes them.
    """

    family = "hyperplane"

    @property
    def planes(self):
        """Normals of the hyperplanes, `(n_hashes, n_bits, n_features)`."""
        return self.parameters.reshape(self.n_hashes, self.n_bits, self.n_features)


class FastHadamard(_AngularFamily):
    """Signs of coordinates after pseudo-random rotations (Andoni et al. 2015): O(log D) a bit.

    Vectors are padded with zeros to D, a power of two >= 64, and rotated by H S G2 H G1 H G0: H
    is the Hadamard matrix, S random signs and G rotations of coordinate pairs by random
    angles, without which sparse vectors would collide too often. Each of the n_bits bits of a
    code has its own S: rows of one rotation are orthogonal, and codes made of them would collide
    too rarely.

    Parameters
    ----------
    n_features : int >= 1
        Length of the vectors.
    n_bits : int, 1 to 16
        Bits of a code (tau in the YOSO paper): more make a sharper kernel.
    n_hashes : int, 1 to 65535
        Number of independent codes a vector gets (m in the YOSO paper): more give less noise.
    seed : None, int >= 0 or numpy.random.Generator
        The same integer always gives the same hash functions.

    Attributes
    ----------
    n_buckets : int
        2^n_bits.
    parameters : float32 array `(1, 3 + n_bits * ceil(n_hashes / D), D)`
        All the random numbers, as the core takes them.
    """

    family = "hadamard"

    @property
    def angles(self):
        """Angles `(3, D/2)` of G0, G1 and G2, which rotate the planes (i, i + D/2)."""
        cosines, sines = np.split(self.parameters[0, :ANGLE_ROWS], 2, axis=-1)
        return np.arctan2(sines, cosines)

    @property
    def signs(self):
        """Diagonals of +1 and -1, `(ceil(n_hashes / D), n_bits, D)`: one for each rotation."""
        return self.parameters[0, ANGLE_ROWS:].reshape(-1, self.n_bits, self.parameters.shape[-1])
