#include "xla.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../common/scoped_handle.h"
#include "libstdcxx.h"
#include "submission.h"

namespace horoplug::tensorflow {
namespace {

// ---- the backend configuration of a call

// Reads a text field by field.
class Fields {
 public:
  explicit Fields(std::string_view text) : rest_(text) {}

  std::string_view next() {
    const std::string_view field = rest_.substr(0, rest_.find(' '));
    rest_.remove_prefix(std::min(field.size() + 1, rest_.size()));
    return field;
  }

  template <typename Number>
  Number number() {
    const std::string_view field = next();
    Number value{};
    const char* const end = std::to_address(field.end());
    const auto [parsed, error] = std::from_chars(std::to_address(field.begin()), end, value);
    if (error != std::errc() || parsed != end || field.empty()) {
      throw Failure(kInternal, "'" + std::string(field) + "' is not a number");
    }
    return value;
  }

  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

const OpRow& row_of(std::string_view name) {
  for (const OpRow& row : kOps) {
    if (row.name == name && row.op != HP_JOIN) return row;
  }
  throw Failure(kInternal, "there is no operation " + std::string(name));
}

// A custom call, parsed from its backend configuration.
struct CustomCall {
  explicit CustomCall(Fields fields);

  Kernel kernel;
  std::int32_t dtype = 0;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<std::int64_t> rows;
};

CustomCall::CustomCall(Fields fields) : kernel(row_of(fields.next())) {
  kernel.reduce_op = fields.number<std::int32_t>();
  kernel.root = fields.number<std::int32_t>();
  kernel.process_set = fields.number<std::int32_t>();
  kernel.prescale = fields.number<double>();
  kernel.postscale = fields.number<double>();
  kernel.wire_dtype = fields.number<std::int32_t>();
  const auto type = fields.number<TF_DataType>();
  const auto count = fields.number<std::size_t>();
  if (count > 0) dtype = data_type(type);
  for (std::size_t i = 0; i < count; ++i) {
    auto& shape = shapes.emplace_back(fields.number<std::size_t>());
    for (std::int64_t& dim : shape) dim = fields.number<std::int64_t>();
    rows.push_back(fields.number<std::int64_t>());
  }
  kernel.name = wire_name(kernel.row, fields.rest());
}

// ---- execution

// Copies a result whose number of rows depends on the other ranks. Throws Failure if it is not the
// number that the program was compiled for.
void copy_rows(const CustomCall& call, hp_engine* engine, hp_handle handle, int index,
               void* output) {
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  check(hp_result(engine, handle, index, &result));
  const std::int64_t expected = call.rows[static_cast<std::size_t>(index)];
  if (result.rows != expected) {
    throw Failure(
        kInvalidArgument,
        call.kernel.name + " has " + std::to_string(result.rows) +
            " rows, but the function was compiled for " + std::to_string(expected) +
            ": in a function that XLA compiles, the tensors of all ranks must have the same shape, "
            "and the number of ranks must not change; use jit_compile=False otherwise");
  }
  if (result.bytes > 0) std::memcpy(output, result.data, static_cast<std::size_t>(result.bytes));
}

void perform(const CustomCall& call, const EngineSlot::Lease& lease, const void** operands,
             std::span<void* const> results) {
  const OpRow& row = call.kernel.row;
  std::vector<hp_tensor> tensors;
  for (std::size_t i = 0; i < call.shapes.size(); ++i) {
    const auto& shape = call.shapes[i];
    const auto ndim = static_cast<std::int32_t>(shape.size());
    void* const output = row.output == Output::kLikeInput ? results[i] : nullptr;
    tensors.push_back({operands[i], output, shape.data(), ndim, 0});
  }
  const hp_submission submission = submission_of(call.kernel, call.dtype, tensors);
  hp_handle handle = 0;
  const hp_status status =
      engine_slot().prepared().perform(lease->engine, submission, -1, false, &handle);
  if (handle == 0) return check(status);
  const bindings::ScopedHandle scoped(lease->engine, handle);
  check(status);
  if (row.output == Output::kLikeInput) return;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    copy_rows(call, lease->engine, handle, static_cast<int>(i), results[i]);
  }
}

void run(std::string_view text, const void** operands, void* output) {
  const EngineSlot::Lease lease = engine_slot().lease();
  if (!lease) throw not_initialized();
  const CustomCall call{Fields(text)};
  if (call.kernel.row.query != Query::kNone) {
    const auto number = static_cast<std::int32_t>(query_result(call.kernel, lease));
    std::memcpy(output, &number, sizeof number);
    return;
  }
  // XLA passes several results as a tuple, and a single one directly.
  const std::size_t count = call.shapes.size();
  const auto results = count > 0 ? std::span<void* const>(static_cast<void**>(output), count + 1)
                                 : std::span<void* const>(&output, 1);
  perform(call, lease, operands, results);
  std::memcpy(results.back(), operands[count], sizeof(std::int32_t));
}

// ---- XLA's interface

// XlaCustomCallStatus: the message of a failure, if there is one.
using CallOutcome = libstdcxx::OptionalString;

// The constructor of libstdc++'s std::string.
using ConstructString = void (*)(void* string, const char* text, std::size_t size,
                                 const void* allocator);
constinit ConstructString construct_string = nullptr;

// XLA destroys the string.
void set_failure(CallOutcome& outcome, std::string_view message) {
  const char allocator = 0;  // std::allocator has no members
  construct_string(&outcome.value, message.data(), message.size(), &allocator);
  outcome.is_there = true;
}

const char* name_of(Code code) {
  switch (code) {
    case kInvalidArgument:
      return "INVALID_ARGUMENT";
    case kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case kInternal:
      return "INTERNAL";
    default:
      return "UNKNOWN";
  }
}

// TensorFlow reports every failure as an InternalError and without the operation, so the message
// contains the code and the operation.
std::string message_of(std::string_view text, Code code, const char* what) {
  return std::string(name_of(code)) + ": " + what + " [" + std::string(Fields(text).next()) + "]";
}

// The custom call on a CPU. `text` is not null-terminated.
void run_on_cpu(void* output, const void** operands, const char* text, std::size_t size,
                CallOutcome* outcome) noexcept {
  const std::string_view configuration(text, size);
  guarded([&] { run(configuration, operands, output); },
          [&](Code code, const char* what) {
            set_failure(*outcome, message_of(configuration, code, what));
          });
}

// The custom call on a GPU, which is not implemented.
void refuse(void* /*stream*/, void** /*buffers*/, const char* /*text*/, std::size_t /*size*/,
            CallOutcome* outcome) noexcept {
  set_failure(*outcome,
              "horoplug runs in functions that XLA compiles for the CPU only, not for a GPU: use "
              "jit_compile=False, or tf.device('CPU') around the function");
}

// std::optional<absl::string_view>. The order of the members of the view is not assumed.
struct Message {
  std::uintptr_t first;
  std::uintptr_t second;
  bool is_there;
};

using Register = void (*)(void* registry, const libstdcxx::String& name, void* function,
                          const libstdcxx::String& platform);
using Global = void* (*)();
using GetMessage = Message (*)(const CallOutcome*);

// Whether XLA reads the message that was written to an outcome.
bool outcome_is_readable(GetMessage get) {
  const CallOutcome success{libstdcxx::String(""), false};
  const CallOutcome failure{libstdcxx::String("a message"), true};
  const Message none = get(&success);
  const Message some = get(&failure);
  const auto data = reinterpret_cast<std::uintptr_t>(failure.value.data);
  const auto size = static_cast<std::uintptr_t>(failure.value.size);
  return !none.is_there && some.is_there &&
         ((some.first == data && some.second == size) ||
          (some.first == size && some.second == data));
}

const char* register_custom_call() {
  void* const library = ::dlopen("libtensorflow_cc.so.2", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return "libtensorflow_cc.so.2";
  Global global = nullptr;
  Register add = nullptr;
  GetMessage get = nullptr;
  if (!find(library, "_ZN3xla24CustomCallTargetRegistry6GlobalEv", global) ||
      !find(library,
            "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_"
            "traitsIcESaIcEEEPvS8_",
            add)) {
    return "xla::CustomCallTargetRegistry";
  }
  if (!find(library, "_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_", get)) {
    return "xla::CustomCallStatusGetMessage";
  }
  if (!find(library, "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcmRKS3_",
            construct_string)) {
    return "the constructor of std::string";
  }
  if (!outcome_is_readable(get)) return "the expected layout of XlaCustomCallStatus";
  void* const registry = global();
  const libstdcxx::String name("horoplug");
  add(registry, name, reinterpret_cast<void*>(run_on_cpu), libstdcxx::String("Host"));
  for (const char* platform : {"CUDA", "ROCM"}) {
    add(registry, name, reinterpret_cast<void*>(refuse), libstdcxx::String(platform));
  }
  return "";
}

}  // namespace

const char* register_xla() {
  static const char* const missing = register_custom_call();
  return missing;
}

}  // namespace horoplug::tensorflow
