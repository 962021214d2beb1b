// OpenSSL's libcrypto of this machine, as Python passes it to the core.
#pragma once

#include <dlfcn.h>

#include <stdexcept>

#include "transport/encrypted/libcrypto.h"

namespace horoplug::testing {

inline hp_libcrypto open_libcrypto() {
  void* library = nullptr;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    if (library == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) throw std::runtime_error("this machine has no libcrypto (libssl3)");
  const auto find = [&](const char* name) { return ::dlsym(library, name); };
  hp_libcrypto found{};
  found.struct_size = sizeof found;
  found.cipher_ctx_new = find("EVP_CIPHER_CTX_new");
  found.cipher_ctx_free = find("EVP_CIPHER_CTX_free");
  found.cipher_ctx_ctrl = find("EVP_CIPHER_CTX_ctrl");
  found.cipher_init_ex = find("EVP_CipherInit_ex");
  found.cipher_update = find("EVP_CipherUpdate");
  found.cipher_final_ex = find("EVP_CipherFinal_ex");
  found.aes_256_gcm = find("EVP_aes_256_gcm");
  found.sha256 = find("EVP_sha256");
  found.hmac = find("HMAC");
  return found;
}

inline const Libcrypto& libcrypto() {
  static const Libcrypto opened = make_libcrypto(open_libcrypto());
  return opened;
}

}  // namespace horoplug::testing
