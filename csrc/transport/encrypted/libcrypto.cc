#include "transport/encrypted/libcrypto.h"

#include "base/status.h"

namespace horoplug {
namespace {

template <typename Function>
void set(Function& function, void* address) {
  if (address == nullptr) {
    throw Error(HP_INVALID_ARGUMENT, "a function of libcrypto is missing");
  }
  function = reinterpret_cast<Function>(address);
}

}  // namespace

Libcrypto make_libcrypto(const hp_libcrypto& given) {
  Libcrypto made{};
  set(made.context_new, given.cipher_ctx_new);
  set(made.context_free, given.cipher_ctx_free);
  set(made.context_ctrl, given.cipher_ctx_ctrl);
  set(made.cipher_init, given.cipher_init_ex);
  set(made.cipher_update, given.cipher_update);
  set(made.cipher_final, given.cipher_final_ex);
  set(made.aes_256_gcm, given.aes_256_gcm);
  set(made.sha256, given.sha256);
  set(made.hmac, given.hmac);
  return made;
}

}  // namespace horoplug
