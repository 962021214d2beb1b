// The part of XLA's foreign function interface (typed FFI, API 0.x) that this library uses: the
// structs that XLA passes to a handler, and the functions in them. Declared here so that the
// library builds without XLA.
//
// XLA only appends to these structs, and stores in each the size of its own version. The names are
// those of XLA's documentation without the prefix.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horoplug::jax::xla {

// The major version that these declarations are of, and its first minor version that passes the
// structs below. XLA refuses to register handlers of another major version than its own.
constexpr int kMajor = 0;
constexpr int kFirstMinor = 1;

enum ExtensionType : int { kExtensionMetadata = 1 };

struct Extension {
  std::size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct ApiVersion {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

// The description of a handler. XLA requests it at registration by a call with this extension.
struct Metadata {
  std::size_t struct_size;
  ApiVersion api_version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

// Opaque. The receiver of an error destroys it.
struct Error;

enum ErrorCode : int {
  kUnknown = 2,
  kInvalidArgument = 3,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
};

struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;  // XLA copies it
  ErrorCode code;
};

struct ErrorMessageArgs {
  std::size_t struct_size;
  Extension* extensions;
  Error* error;
  const char* message;  // out
};

struct ErrorDestroyArgs {
  std::size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct StreamArgs {
  std::size_t struct_size;
  Extension* extensions;
  void* context;
  void* stream;  // out: a CUstream
};

struct OrdinalArgs {
  std::size_t struct_size;
  Extension* extensions;
  void* context;
  std::int32_t ordinal;  // out
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  ApiVersion api_version;
  const void* internal;
  Error* (*error_create)(ErrorCreateArgs*);
  void (*error_message)(ErrorMessageArgs*);
  void (*error_destroy)(ErrorDestroyArgs*);
  void* handler_register;
  Error* (*stream)(StreamArgs*);
  // Not used: functions for types, contexts, states (4), memory (2), threads (2), futures (3),
  // runs.
  void* others[12];
  Error* (*ordinal)(OrdinalArgs*);  // missing in the first versions: check struct_size
};

enum DataType : int { kInvalid = 0, kToken = 17 };

struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

struct ByteSpan {
  const char* data;
  std::size_t size;
};

enum AttributeType : int { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };

struct Scalar {
  DataType dtype;
  void* value;
};

struct Array {
  DataType dtype;
  std::size_t size;
  void* data;
};

// Arguments and results alike.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  int* types;
  Buffer** buffers;
};

struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  AttributeType* types;
  ByteSpan** names;  // ascending
  void** values;     // Array, Scalar or ByteSpan
};

enum Stage : int { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  Stage stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

}  // namespace horoplug::jax::xla
