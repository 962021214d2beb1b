// Typed, checked access to the arguments, results and attributes of a custom call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "horoplug/horoplug.h"
#include "xla_ffi.h"

namespace horoplug::jax {

// The failure of a call. Thrown inside of this library only.
class Failure : public std::runtime_error {
 public:
  Failure(xla::ErrorCode code, const std::string& message)
      : Failure(code, message, code == xla::kFailedPrecondition ? HP_MISMATCH : HP_INTERNAL,
                message) {}
  // The code and the message (what()) for XLA, and the status and the reason for horoplug's Python.
  xla::ErrorCode code() const { return code_; }
  hp_status status() const { return status_; }
  const std::string& reason() const { return reason_; }

  // From the last failure of the core on this thread. `subject`, the operation, is prepended unless
  // the core's message contains it.
  static Failure of(hp_status status, const std::string& subject = "");

 private:
  Failure(xla::ErrorCode code, const std::string& message, hp_status status, std::string reason)
      : std::runtime_error(message), code_(code), status_(status), reason_(std::move(reason)) {}

  xla::ErrorCode code_;
  hp_status status_;
  std::string reason_;
};

inline void check(hp_status status, const std::string& subject = "") {
  if (status != HP_OK) throw Failure::of(status, subject);
}

// A tensor in memory of XLA, dense and in row-major order.
struct Tensor {
  explicit Tensor(const xla::Buffer& buffer);

  std::int32_t dtype;  // hp_dtype
  void* data;
  std::vector<std::int64_t> shape;

  std::int64_t rows() const { return shape.empty() ? 1 : shape.front(); }
  std::size_t bytes() const;
};

// The tensors among arguments or results. Tokens, which only order calls, are left out.
std::vector<Tensor> tensors_of(const xla::Buffers& buffers);

// The attributes of a call. Python passes all of them, so a missing one is a defect.
class Attributes {
 public:
  explicit Attributes(const xla::Attributes& attributes) : attributes_(attributes) {}

  std::string text(std::string_view name) const;
  double number(std::string_view name) const;
  std::int32_t integer(std::string_view name) const;
  std::vector<std::int64_t> integers(std::string_view name) const;

 private:
  const void* find(std::string_view name, xla::AttributeType type) const;
  const void* scalar(std::string_view name, xla::DataType dtype) const;

  const xla::Attributes& attributes_;
};

}  // namespace horoplug::jax
