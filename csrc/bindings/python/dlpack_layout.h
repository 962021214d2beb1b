// The structures of DLPack 1 (github.com/dmlc/dlpack) that the bindings read.
#pragma once

#include <cstdint>

namespace horoplug::python {

constexpr std::uint32_t kDlMajor = 1;
constexpr std::int32_t kDlCpu = 1;

struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; nullptr: in row-major order without gaps
  std::uint64_t byte_offset;
};

// What a class of tensors offers to C as __dlpack_c_exchange_api__, since version 1.2.
struct DlExchange {
  static constexpr const char* kName = "dlpack_exchange_api";  // of the capsule

  std::uint32_t major, minor;
  DlExchange* previous;  // an older version; nullptr: there is none
  void* allocate;
  void* to_managed;
  void* from_managed;
  // Describes a tensor, which stays the owner of its memory and of its shape. Does not wait for a
  // GPU. -1: there is an exception. nullptr: not offered.
  int (*describe)(void* tensor, DlTensor* description);
  void* current_stream;
};

}  // namespace horoplug::python
