// OpenSSL's libcrypto, used without its headers and without linking to it: the caller of the C ABI
// has loaded the library and passes the addresses of its functions (hp_libcrypto). Their
// signatures are the same in OpenSSL 1.1.1 and 3.
#pragma once

#include <cstddef>

#include "horoplug/horoplug.h"

namespace horoplug {

struct Libcrypto {
  // EVP_CIPHER_CTX, EVP_CIPHER, EVP_MD and ENGINE, which only libcrypto knows.
  struct CipherContext;
  struct Cipher;
  struct Digest;
  struct Engine;

  CipherContext* (*context_new)();
  void (*context_free)(CipherContext*);
  int (*context_ctrl)(CipherContext*, int command, int value, void* memory);
  int (*cipher_init)(CipherContext*, const Cipher*, Engine*, const unsigned char* key,
                     const unsigned char* nonce, int encrypt);
  int (*cipher_update)(CipherContext*, unsigned char* out, int* out_bytes, const unsigned char* in,
                       int in_bytes);
  int (*cipher_final)(CipherContext*, unsigned char* out, int* out_bytes);
  const Cipher* (*aes_256_gcm)();
  const Digest* (*sha256)();
  unsigned char* (*hmac)(const Digest*, const void* key, int key_bytes, const unsigned char* data,
                         std::size_t bytes, unsigned char* result, unsigned* result_bytes);
};

// Throws Error if a function is missing.
Libcrypto make_libcrypto(const hp_libcrypto& given);

}  // namespace horoplug
