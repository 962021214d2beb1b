// The C ABI of the library's version and capabilities, and of the last error.
#include "collectives/collective.h"
#include "collectives/point_to_point.h"
#include "device/cpu/kernels.h"
#include "engine/abi/abi.h"

namespace {

thread_local std::string last_error;

}  // namespace

namespace horoplug::abi {

hp_status report(hp_status code, const std::string& text) {
  last_error = text;
  return code;
}

}  // namespace horoplug::abi

extern "C" {

int32_t hp_abi_version(void) { return HP_ABI_VERSION; }

const char* hp_version(void) { return HOROPLUG_VERSION; }

const char* hp_last_error(void) { return last_error.c_str(); }

const char* hp_op_name(int32_t op) {
  return op < 0 || op >= HP_OP_COUNT ? "unknown operation"
                                     : horoplug::op_kind_name(static_cast<horoplug::OpKind>(op));
}

size_t hp_dtype_size(int32_t dtype) {
  return dtype < 0 || dtype >= HP_DTYPE_COUNT
             ? 0
             : horoplug::dtype_size(static_cast<horoplug::DType>(dtype));
}

const char* hp_cpu_kernels(void) { return horoplug::kernels().name; }

const char* hp_algorithms(void) {
  static const std::string* const text = [] {
    auto* lines = new std::string;
    for (const auto& algorithm : horoplug::algorithms()) {
      *lines += std::string(horoplug::op_kind_name(algorithm.kind)) + " " + algorithm.name + " " +
                algorithm.medium + "\n";
    }
    for (const auto kind : {horoplug::OpKind::kSend, horoplug::OpKind::kReceive}) {
      for (const auto& path : horoplug::transfer_paths()) {
        *lines +=
            std::string(horoplug::op_kind_name(kind)) + " " + path.name + " " + path.medium + "\n";
      }
    }
    return lines;
  }();
  return text->c_str();
}

}  // extern "C"
