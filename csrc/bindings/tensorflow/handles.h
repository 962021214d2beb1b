// Owners of the objects of TensorFlow's C API, and the failure of a call.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "tf_api.h"

namespace horoplug::tensorflow {

// The failure of a kernel. Thrown inside of this library only.
class Failure : public std::runtime_error {
 public:
  Failure(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

// A TF_Status that is passed to a call and checked after it.
class CallStatus {
 public:
  CallStatus() : status_(api().NewStatus()) {}
  CallStatus(Code code, const char* message) : CallStatus() {
    api().SetStatus(status_, code, message);
  }
  ~CallStatus() { api().DeleteStatus(status_); }
  CallStatus(const CallStatus&) = delete;
  CallStatus& operator=(const CallStatus&) = delete;

  TF_Status* get() const { return status_; }
  bool ok() const { return api().GetCode(status_) == kOk; }
  void check() const {
    if (!ok()) throw Failure(static_cast<Code>(api().GetCode(status_)), api().Message(status_));
  }

 private:
  TF_Status* const status_;
};

// Runs `body` and passes the code and the message of an exception to `report`: no exception may
// reach TensorFlow's code. Returns whether `body` has succeeded.
template <typename Body, typename Report>
bool guarded(Body&& body, Report&& report) noexcept {
  try {
    body();
    return true;
  } catch (const Failure& failure) {
    report(failure.code(), failure.what());
  } catch (const std::bad_alloc&) {
    report(kResourceExhausted, "horoplug is out of memory");
  } catch (const std::exception& error) {
    report(kInternal, error.what());
  } catch (...) {
    report(kInternal, "unknown exception in horoplug");
  }
  return false;
}

struct TensorDeleter {
  void operator()(TF_Tensor* tensor) const { api().DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, TensorDeleter>;

struct ShapeDeleter {
  void operator()(TF_ShapeHandle* shape) const { api().DeleteShapeHandle(shape); }
};
using ShapeHandle = std::unique_ptr<TF_ShapeHandle, ShapeDeleter>;

}  // namespace horoplug::tensorflow
