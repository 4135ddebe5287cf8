"""The compiled core: takes arrays and tensors alike, here `object`, and writes into those given."""

from typing import Any

instruction_sets: str
with_cuda: bool

class BucketUnion:
    def size(self) -> int: ...
    def copy(self, indices: object, counts: object, threads: int = 0) -> None: ...

def bucket_sizes(
    tables: tuple[Any, ...], query_codes: object, sizes: object, threads: int = 0
) -> None: ...
def bucket_sum(
    query_codes: object,
    key_codes: object,
    values: object,
    n_buckets: int,
    order: int,
    key_mask: object,
    scale: float,
    out: object,
    threads: int = 0,
) -> None: ...
def bucket_table_add(
    table: object, codes: object, values: object, sign: float, threads: int = 0
) -> None: ...
def bucket_table_query(
    table: object, codes: object, scale: float, out: object, threads: int = 0
) -> None: ...
def bucket_union(
    tables: tuple[Any, ...], query_codes: object, max_size: int, indptr: object, threads: int = 0
) -> BucketUnion: ...
def build_hash_tables(
    codes: object, tables: tuple[Any, ...], n_buckets: object, threads: int = 0
) -> None: ...
def cache_sizes() -> tuple[int, int]: ...
def cell_kernel_sums(
    kernel: int,
    n_bits: int,
    queries: object,
    probes: object,
    blocks: object,
    first: object,
    begin: object,
    end: object,
    weights: object,
    out: object,
    threads: int = 0,
) -> None: ...
def collision_indptr(
    query_codes: object,
    key_codes: object,
    key_mask: object,
    causal: bool,
    indptr: object,
    threads: int = 0,
) -> None: ...
def code_keys(
    key: object,
    codes: object,
    planes: object,
    centre: object,
    norm: object,
    starts: object,
    sequence: int,
    begin: int,
    end: int,
    threads: int = 0,
) -> None: ...
def code_step(
    query: object,
    key: object,
    value: object,
    codes: object,
    planes: object,
    centre: object,
    norm: object,
    starts: object,
    scale: float,
    n_sinks: int,
    window: int,
    epsilon: float,
    quantile: float,
    min_share: float,
    max_share: float,
    exact_below: int,
    seed: int,
    out: object,
    log_sum: object,
    error: object,
    n_read: object,
    threads: int = 0,
) -> None: ...
def collisions(
    query_codes: object,
    key_codes: object,
    key_mask: object,
    causal: bool,
    indptr: object,
    indices: object,
    counts: object,
    threads: int = 0,
) -> None: ...
def compiler() -> str: ...
def cuda_architectures() -> str: ...
def decode(
    sums: object,
    counts: object,
    batch: int,
    parameters: object,
    family: int,
    n_bits: int,
    n_hashes: int,
    sharpness: object,
    query_probes: int,
    key_probes: int,
    normalize: int,
    query: object,
    key: object,
    value: object,
    key_mask: object,
    causal: bool,
    out: object,
    threads: int = 0,
) -> None: ...
def draw(
    tables: tuple[Any, ...],
    query_codes: object,
    rotate: bool,
    seed: int,
    indices: object,
    probabilities: object,
    table_numbers: object,
    threads: int = 0,
) -> None: ...
def euclidean_hash(
    x: object,
    directions: object,
    shifts: object,
    multipliers: object,
    codes: object,
    threads: int = 0,
) -> None: ...
def expected_backward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    n_bits: int,
    causal: bool,
    normalize: int,
    gradient: int,
    grad_out: object,
    grad_query: object,
    grad_key: object,
    grad_value: object,
    threads: int = 0,
    *,
    query_starts: object = None,
    key_starts: object = None,
) -> None: ...
def expected_forward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    n_bits: int,
    causal: bool,
    normalize: int,
    out: object,
    threads: int = 0,
    *,
    query_starts: object = None,
    key_starts: object = None,
) -> None: ...
def hash(
    x: object,
    parameters: object,
    family: int,
    n_bits: int,
    n_hashes: int,
    codes: object,
    threads: int = 0,
) -> bool: ...
def instruction_set() -> str: ...
def kernel_sums(
    kernel: int,
    n_bits: int,
    queries: object,
    keys: object,
    centre: object,
    inverse_scale: object,
    weights: object,
    out: object,
    threads: int = 0,
    n_keys: int = -1,
    given: object = None,
    widths: object = None,
    edge: float = 1.0,
) -> None: ...
def leave_one_out(
    kernel: int,
    queries: object,
    own: object,
    keys: object,
    weights: object,
    scales: object,
    nearest: object,
    out: object,
    threads: int = 0,
) -> None: ...
def listed_kernel_sums(
    kernel: int,
    n_bits: int,
    queries: object,
    probes: object,
    rows: object,
    order: object,
    indptr: object,
    weights: object,
    low: int,
    high: int,
    out: object,
    threads: int = 0,
) -> None: ...
def lsh_attention_backward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    query_codes: object,
    key_codes: object,
    n_bits: int,
    scale: float,
    weighting: int,
    causal: bool,
    offset: int,
    window: int,
    n_sinks: int,
    grad_out: object,
    out: object,
    log_sum: object,
    grad_query: object,
    grad_key: object,
    grad_value: object,
    threads: int = 0,
) -> None: ...
def lsh_attention_forward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    query_codes: object,
    key_codes: object,
    n_bits: int,
    scale: float,
    weighting: int,
    causal: bool,
    offset: int,
    window: int,
    n_sinks: int,
    out: object,
    log_sum: object,
    pairs: object,
    threads: int = 0,
) -> None: ...
def max_threads() -> int: ...
def nearest_cells(
    queries: object, centre_blocks: object, n_cells: int, out: object, threads: int = 0
) -> None: ...
def pair_products(
    queries: object,
    keys: object,
    indptr: object,
    indices: object,
    measure: int,
    out: object,
    threads: int = 0,
) -> None: ...
def partition_sums(
    queries: object,
    rows: object,
    bias: object,
    order: object,
    start: object,
    probes: object,
    min_count: int,
    sample: object,
    out: object,
    threads: int = 0,
) -> None: ...
def random_binning_hash(
    x: object, scales: object, shifts: object, multipliers: object, codes: object, threads: int = 0
) -> None: ...
def random_normals(seed: object, stream: int, out: object) -> bool: ...
def random_numbers(seed: object, stream: int, n_angle_rows: int, out: object) -> bool: ...
def set_max_threads(n: int, /) -> int: ...
def soft_attention_backward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    parameters: object,
    sharpness: object,
    family: int,
    n_bits: int,
    n_hashes: int,
    query_probes: int,
    key_probes: int,
    causal: bool,
    normalize: int,
    grad_out: object,
    query_codes: object,
    query_bits: object,
    query_margins: object,
    key_codes: object,
    key_bits: object,
    key_margins: object,
    divisors: object,
    out: object,
    grad_query: object,
    grad_key: object,
    grad_value: object,
    grad_sharpness: object,
    threads: int = 0,
    *,
    query_starts: object = None,
    key_starts: object = None,
    grad_parameters: object = None,
) -> None: ...
def soft_attention_forward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    parameters: object,
    sharpness: object,
    family: int,
    n_bits: int,
    n_hashes: int,
    query_probes: int,
    key_probes: int,
    causal: bool,
    normalize: int,
    out: object,
    query_codes: object,
    query_bits: object,
    query_margins: object,
    key_codes: object,
    key_bits: object,
    key_margins: object,
    divisors: object,
    threads: int = 0,
    *,
    query_starts: object = None,
    key_starts: object = None,
) -> None: ...
def soft_hash(
    x: object,
    parameters: object,
    sharpness: object,
    family: int,
    n_bits: int,
    n_hashes: int,
    n_probes: int,
    codes: object,
    bits: object,
    margins: object,
    probe_codes: object,
    weights: object,
    threads: int = 0,
) -> bool: ...
def soft_hash_backward(
    x: object,
    parameters: object,
    sharpness: object,
    family: int,
    n_bits: int,
    n_hashes: int,
    n_probes: int,
    codes: object,
    bits: object,
    margins: object,
    weights: object,
    grad_weights: object,
    grad_x: object,
    grad_sharpness: object,
    grad_parameters: object,
    threads: int = 0,
) -> None: ...
def thread_backend() -> str: ...
def use_large_pages(tensor: object) -> None: ...
def weighted_bucket_sum(
    query_codes: object,
    query_weights: object,
    query_probes: int,
    key_codes: object,
    key_weights: object,
    key_probes: int,
    values: object,
    n_buckets: int,
    order: int,
    key_mask: object,
    scale: float,
    out: object,
    threads: int = 0,
) -> None: ...
def weighted_bucket_sum_backward(
    query_codes: object,
    query_weights: object,
    query_probes: int,
    key_codes: object,
    key_weights: object,
    key_probes: int,
    values: object,
    n_buckets: int,
    order: int,
    key_mask: object,
    scale: float,
    grad_out: object,
    grad_values: object,
    grad_query_weights: object,
    grad_key_weights: object,
    threads: int = 0,
) -> None: ...
def yoso_backward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    query_codes: object,
    key_codes: object,
    n_bits: int,
    causal: bool,
    normalize: int,
    gradient: int,
    grad_out: object,
    grad_query: object,
    grad_key: object,
    grad_value: object,
    threads: int = 0,
    *,
    window: int = 0,
    gradient_rank: int = 0,
    rotation: object = None,
    bfloat16_products: bool = False,
    query_starts: object = None,
    key_starts: object = None,
    gradient_query_codes: object = None,
    gradient_key_codes: object = None,
    out: object = None,
    divisors: object = None,
) -> None: ...
def yoso_forward(
    query: object,
    key: object,
    value: object,
    key_mask: object,
    parameters: object,
    family: int,
    n_bits: int,
    n_hashes: int,
    causal: bool,
    normalize: int,
    out: object,
    query_codes: object,
    key_codes: object,
    threads: int = 0,
    *,
    window: int = 0,
    query_starts: object = None,
    key_starts: object = None,
    divisors: object = None,
) -> None: ...
