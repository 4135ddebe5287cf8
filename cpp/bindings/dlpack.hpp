#pragma once
// The part of the DLPack 1.x binary interface that we read (https://dmlc.github.io/dlpack/latest):
// plain C structs whose field order and sizes are fixed by the standard. Nothing is vendored, and
// nothing here links to the library that a tensor comes from.
#include <cstddef>
#include <cstdint>

namespace lshkit::dlpack {

constexpr std::uint32_t kMajorVersion = 1;  // another major version has another layout

struct Version {
  std::uint32_t major, minor;
};

enum DeviceType : std::int32_t { cpu = 1, cuda = 2, cuda_pinned_host = 3 };
struct Device {
  std::int32_t type, id;
};

enum TypeCode : std::uint8_t {
  signed_integer = 0,
  unsigned_integer = 1,
  floating = 2,
  bfloat = 4,
  complex = 5,
  boolean = 6,
};
struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;  // 1 for scalars
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t n_dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null means row-major contiguous before version 1.2
  std::uint64_t byte_offset;
};

// What a capsule named "dltensor" holds. The consumer calls the deleter, which frees the struct.
struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

// What a capsule named "dltensor_versioned" holds. Under another major version only the deleter
// may be touched.
struct ManagedTensorVersioned {
  Version version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};
constexpr std::uint64_t kReadOnlyFlag = 1;

// type(x).__dlpack_c_exchange_api__ is a capsule "dlpack_exchange_api" of this table of functions,
// valid as long as the process. `previous` chains to tables of lower major versions.
struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};
struct ExchangeApi {
  ExchangeHeader header;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*export_managed)(void* object, ManagedTensorVersioned** out);
  int (*import_managed)(ManagedTensorVersioned* tensor, void** object);
  // Fills *out with pointers that the object keeps owning. May be null. 0, or -1 with a Python
  // error.
  int (*borrow)(void* object, Tensor* out);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

static_assert(sizeof(void*) == 8, "the offsets below are those of a 64-bit platform");
static_assert(sizeof(DataType) == 4 && sizeof(Device) == 8 && sizeof(Tensor) == 48);
static_assert(offsetof(Tensor, n_dims) == 16 && offsetof(Tensor, dtype) == 20);
static_assert(offsetof(Tensor, shape) == 24 && offsetof(Tensor, byte_offset) == 40);
static_assert(offsetof(ManagedTensor, deleter) == 56 && sizeof(ManagedTensor) == 64);
static_assert(offsetof(ManagedTensorVersioned, deleter) == 16);
static_assert(offsetof(ManagedTensorVersioned, tensor) == 32);
static_assert(offsetof(ExchangeApi, allocate) == 16 && offsetof(ExchangeApi, borrow) == 40);
static_assert(sizeof(ExchangeApi) == 56);

}  // namespace lshkit::dlpack
