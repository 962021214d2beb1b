#include "xla.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../common/operation.h"
#include "calls.h"

namespace horoplug::tensorflow {
namespace {

// ---- the text of a call
// ---------------------------------------------------------------------------

// Takes a text apart, word by word.
class Words {
 public:
  explicit Words(std::string_view text) : rest_(text) {}

  std::string_view next() {
    const std::string_view word = rest_.substr(0, rest_.find(' '));
    rest_.remove_prefix(std::min(word.size() + 1, rest_.size()));
    return word;
  }

  template <typename Number>
  Number number() {
    const std::string_view word = next();
    Number value{};
    const char* const end = word.data() + word.size();
    const auto [parsed, error] = std::from_chars(word.data(), end, value);
    if (error != std::errc() || parsed != end || word.empty()) {
      throw Failure(kInternal, "'" + std::string(word) + "' is no number");
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

// One custom call as its text has it.
struct CustomCall {
  explicit CustomCall(Words words);

  Kernel kernel;
  std::int32_t dtype = 0;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<std::int64_t> rows;
};

CustomCall::CustomCall(Words words) : kernel(row_of(words.next())) {
  kernel.reduce_op = words.number<std::int32_t>();
  kernel.root = words.number<std::int32_t>();
  kernel.process_set = words.number<std::int32_t>();
  kernel.prescale = words.number<double>();
  kernel.postscale = words.number<double>();
  kernel.wire_dtype = words.number<std::int32_t>();
  const auto type = words.number<TF_DataType>();
  const auto count = words.number<std::size_t>();
  if (count > 0) dtype = data_type(type);
  for (std::size_t i = 0; i < count; ++i) {
    auto& shape = shapes.emplace_back(words.number<std::size_t>());
    for (std::int64_t& dim : shape) dim = words.number<std::int64_t>();
    rows.push_back(words.number<std::int64_t>());
  }
  if (!words.rest().empty()) {
    kernel.name = std::string(kernel.row.prefix) + "." + std::string(words.rest());
  }
}

// ---- running it
// -----------------------------------------------------------------------------------

// What the other ranks decide about, against what the program was compiled for.
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
            ": in a function that XLA compiles, tensors have the same shape on all ranks "
            "and their number stays what it was; use jit_compile=False where they do not.");
  }
  if (result.bytes > 0) std::memcpy(output, result.data, static_cast<std::size_t>(result.bytes));
}

void perform(const CustomCall& call, const Job::Loan& job, const void** operands, void** results) {
  const OpRow& row = call.kernel.row;
  std::vector<hp_tensor> tensors;
  for (std::size_t i = 0; i < call.shapes.size(); ++i) {
    const auto& shape = call.shapes[i];
    const auto ndim = static_cast<std::int32_t>(shape.size());
    void* const output = row.output == Output::kLikeInput ? results[i] : nullptr;
    tensors.push_back({operands[i], output, shape.data(), ndim, 0});
  }
  const hp_submission submission = describe(call.kernel, call.dtype, tensors);
  hp_handle handle = 0;
  const hp_status status = hp_perform(job->engine, &submission, -1, &handle);
  if (handle == 0) check(status);
  const bindings::Release release(job->engine, handle);
  check(status);
  if (row.output == Output::kLikeInput) return;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    copy_rows(call, job->engine, handle, static_cast<int>(i), results[i]);
  }
}

void run(std::string_view text, const void** operands, void* output) {
  const Job::Loan engine = job().borrow();
  if (!engine) throw not_initialized();
  const CustomCall call{Words(text)};
  if (call.kernel.row.query != Query::kNone) {
    const auto number = static_cast<std::int32_t>(look_up(call.kernel, engine));
    std::memcpy(output, &number, sizeof number);
    return;
  }
  // XLA makes a tuple of several results only.
  const std::size_t count = call.shapes.size();
  void** const results = count > 0 ? static_cast<void**>(output) : &output;
  perform(call, engine, operands, results);
  std::memcpy(results[count], operands[count], sizeof(std::int32_t));
}

// ---- XLA
// ------------------------------------------------------------------------------------------

// What XLA hands over for a failure: absent as long as there is none.
using Outcome = std::optional<std::string>;

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

// TensorFlow makes an InternalError of everything, so that the message has the code, and the
// operation, which TensorFlow adds elsewhere.
std::string message_of(std::string_view text, Code code, const char* what) {
  return std::string(name_of(code)) + ": " + what + " [" + std::string(Words(text).next()) + "]";
}

// The call on a processor. Its text need not end with a zero.
void run_on_host(void* output, const void** operands, const char* text, std::size_t size,
                 Outcome* outcome) noexcept {
  const std::string_view words(text, size);
  guarded([&] { run(words, operands, output); },
          [&](Code code, const char* what) { *outcome = message_of(words, code, what); });
}

// The call on a GPU, which is not there.
void refuse(void* /*stream*/, void** /*buffers*/, const char* /*text*/, std::size_t /*size*/,
            Outcome* outcome) noexcept {
  *outcome =
      "horoplug runs in functions that XLA compiles for the CPU only, not for a GPU: use "
      "jit_compile=False, or tf.device('CPU') around the function.";
}

// A view of the message, in whatever order its two members are.
struct Message {
  std::uintptr_t first;
  std::uintptr_t second;
  bool is_there;
};

using Register = void (*)(void* registry, const std::string& name, void* function,
                          const std::string& platform);
using Global = void* (*)();
using GetMessage = Message (*)(const Outcome*);

// Whether XLA sees in an outcome what was put there.
bool is_understood(GetMessage get) {
  const Outcome good;
  const Outcome bad = "a message that is too long to be kept inside of a string";
  const Message none = get(&good);
  const Message some = get(&bad);
  const auto data = reinterpret_cast<std::uintptr_t>(bad->data());
  const auto size = static_cast<std::uintptr_t>(bad->size());
  return !none.is_there && some.is_there &&
         ((some.first == data && some.second == size) ||
          (some.first == size && some.second == data));
}

template <typename Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}

const char* make_known() {
  void* const library = ::dlopen("libtensorflow_cc.so.2", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return "libtensorflow_cc.so.2";
  const auto global = find<Global>(library, "_ZN3xla24CustomCallTargetRegistry6GlobalEv");
  const auto add = find<Register>(
      library,
      "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_"
      "traitsIcESaIcEEEPvS8_");
  const auto get =
      find<GetMessage>(library, "_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_");
  if (global == nullptr || add == nullptr) return "xla::CustomCallTargetRegistry";
  if (get == nullptr) return "xla::CustomCallStatusGetMessage";
  if (!is_understood(get)) return "XlaCustomCallStatus as it was";
  void* const registry = global();
  add(registry, "horoplug", reinterpret_cast<void*>(run_on_host), "Host");
  for (const char* platform : {"CUDA", "ROCM"}) {
    add(registry, "horoplug", reinterpret_cast<void*>(refuse), platform);
  }
  return "";
}

}  // namespace

const char* register_xla() {
  static const char* const missing = make_known();
  return missing;
}

}  // namespace horoplug::tensorflow
