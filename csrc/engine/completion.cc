#include "engine/completion.h"

namespace horoplug {

void Completion::end(std::span<const OperationPtr> operations, const Status& status) {
  if (operations.empty()) return;
  tracing_.ended(operations, status);
  submissions_.forget(operations);
  if (!status.ok()) {
    for (const OperationPtr& operation : operations) {
      const bool named = status.message.find(operation->name()) != std::string::npos;
      operation->status = {status.code, named
                                            ? status.message
                                            : operation->describe() + " failed: " + status.message};
    }
  }
  handles_.finish_all(operations);
}

}  // namespace horoplug
