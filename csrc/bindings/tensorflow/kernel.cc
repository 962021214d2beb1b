#include "kernel.h"

#include <charconv>

#include "handles.h"

namespace horoplug::tensorflow {
namespace {

// The attributes of one kernel.
class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction) : construction_(construction) {}

  std::int32_t integer(const char* name) const {
    std::int64_t value = 0;
    api().OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_.get());
    status_.check();
    return static_cast<std::int32_t>(value);
  }

  bool boolean(const char* name) const {
    unsigned char value = 0;
    api().OpKernelConstruction_GetAttrBool(construction_, name, &value, status_.get());
    status_.check();
    return value != 0;
  }

  std::string text(const char* name) const {
    std::int32_t list = 0;
    std::int32_t bytes = 0;
    api().OpKernelConstruction_GetAttrSize(construction_, name, &list, &bytes, status_.get());
    status_.check();
    std::string value(static_cast<std::size_t>(bytes), '\0');
    api().OpKernelConstruction_GetAttrString(construction_, name, value.data(), value.size(),
                                             status_.get());
    status_.check();
    return value;
  }

  // A string attribute: TensorFlow's floating-point attributes have 32 bits, which is not precise
  // enough for a scale factor.
  double number(const char* name) const {
    const std::string written = text(name);
    double value = 0;
    const char* const end = written.data() + written.size();
    const auto [parsed, error] = std::from_chars(written.data(), end, value);
    if (error != std::errc() || parsed != end) {
      throw Failure(kInvalidArgument, std::string(name) + "='" + written + "' is not a number");
    }
    return value;
  }

 private:
  TF_OpKernelConstruction* const construction_;
  CallStatus status_;
};

// The name that the user has given or, in a graph, the node's name, which is unique there.
std::string name_of(const Attributes& attributes, bool blocking,
                    TF_OpKernelConstruction* construction) {
  std::string name = attributes.text("tensor_name");
  if (name.empty() && !blocking) {
    const TF_StringView node = api().OpKernelConstruction_GetName(construction);
    std::string_view given(node.data, node.len);
    if (attributes.boolean("ignore_name_scope")) given = given.substr(given.rfind('/') + 1);
    name = given;
  }
  return name;
}

}  // namespace

std::string wire_name(const OpRow& row, std::string_view name) {
  return name.empty() ? "" : std::string(hp_op_name(row.op)) + "." + std::string(name);
}

Kernel::Kernel(const OpRow& op, TF_OpKernelConstruction* construction) : row(op) {
  const Attributes attributes(construction);
  if (row.query == Query::kNone) blocking = attributes.boolean("blocking");
  if (row.takes_any(kTakesName)) {
    name = wire_name(row, name_of(attributes, blocking, construction));
  }
  if (row.takes_any(kTakesSet)) process_set = attributes.integer("process_set_id");
  if (row.takes_any(kTakesRoot)) root = attributes.integer("root_rank");
  if (row.takes_any(kTakesReduction)) {
    reduce_op = attributes.integer("reduce_op");
    prescale = attributes.number("prescale_factor");
    postscale = attributes.number("postscale_factor");
  }
  if (row.takes_any(kTakesCompression)) wire_dtype = attributes.integer("wire_dtype");
  if (row.takes_any(kTakesLayout)) layout = attributes.text("layout");
}

}  // namespace horoplug::tensorflow
