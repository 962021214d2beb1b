#include "kernel.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "handles.h"

namespace horoplug::tensorflow {
namespace {

// Added to the name of a node for the name of the node that starts its operation.
constexpr std::string_view kStartSuffix = "_start";

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
std::string name_of(const Attributes& attributes, bool blocking, std::string_view node) {
  std::string name = attributes.text("tensor_name");
  if (name.empty() && !blocking) {
    if (attributes.boolean("ignore_name_scope")) node = node.substr(node.rfind('/') + 1);
    name = node;
  }
  return name;
}

std::string node_of(TF_OpKernelConstruction* construction) {
  const TF_StringView node = api().OpKernelConstruction_GetName(construction);
  return std::string(node.data, node.len);
}

// The row that a kernel runs.
const OpRow& row_of(const OpRow& op, const Attributes& attributes) {
  if (op.query != Query::kStart) return op;
  const std::string wanted = attributes.text("row");
  const auto* const found =
      std::find_if(kOps.begin(), kOps.end(), [&](const OpRow& row) { return wanted == row.name; });
  if (found == kOps.end()) throw Failure(kInvalidArgument, "there is no operation " + wanted);
  return *found;
}

}  // namespace

std::string wire_name(const OpRow& row, std::string_view name) {
  return name.empty() ? "" : std::string(hp_op_name(row.op)) + "." + std::string(name);
}

Kernel::Kernel(const OpRow& op, TF_OpKernelConstruction* construction)
    : row(row_of(op, Attributes(construction))), starts(op.query == Query::kStart) {
  const Attributes attributes(construction);
  if (op.query == Query::kNone) blocking = attributes.boolean("blocking");
  if (!blocking && row.query == Query::kNone) {
    node = node_of(construction);
    if (starts) queue = attributes.text("queue");
    if (starts) node.resize(node.size() - std::min(node.size(), kStartSuffix.size()));
  }
  if (row.takes_any(kTakesName)) name = wire_name(row, name_of(attributes, blocking, node));
  if (row.takes_any(kTakesSet)) process_set = attributes.integer("process_set_id");
  if (row.takes_any(kTakesRoot)) root = attributes.integer("root_rank");
  if (row.takes_any(kTakesReduction)) {
    reduce_op = attributes.integer("reduce_op");
    prescale = attributes.number("prescale_factor");
    postscale = attributes.number("postscale_factor");
  }
  if (row.takes_any(kTakesCompression)) wire_dtype = attributes.integer("wire_dtype");
}

}  // namespace horoplug::tensorflow
