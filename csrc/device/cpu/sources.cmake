# Compiler flags of the CPU kernels: one source file per instruction set. To be included by the directory that defines
# the target that compiles them.
#   -ffp-contract=off   no fused multiply-add: all tables must give the same bits
#   -O3                 the loops rely on unrolling; not with a sanitizer, where it takes a third longer to compile
#   -fno-sanitize=undefined
#                       the same source is checked for undefined behaviour in kernels_baseline.cc
# They may not join a unity build, which would give one file's flags to another, nor use precompiled headers, which were
# compiled for another instruction set.
set(_hp_kernels ${CMAKE_CURRENT_LIST_DIR}/kernels)
set(_hp_kernel_flags -ffp-contract=off)
set(_hp_unchecked)
if(NOT HOROPLUG_SANITIZE)
  list(APPEND _hp_kernel_flags -O3)
elseif(HOROPLUG_SANITIZE STREQUAL "address")
  set(_hp_unchecked -fno-sanitize=undefined)
endif()

# Versions of clang that know AVX10 take AVX-512 for 256 bits wide unless they are told.
set(_hp_wide)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 18
   AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 21)
  set(_hp_wide -mevex512)
endif()

set_source_files_properties(${_hp_kernels}_baseline.cc PROPERTIES COMPILE_OPTIONS "${_hp_kernel_flags}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(
    ${_hp_kernels}_avx2.cc PROPERTIES COMPILE_OPTIONS "${_hp_kernel_flags};-mavx2;-mf16c;${_hp_unchecked}")
  set_source_files_properties(
    ${_hp_kernels}_avx512.cc
    PROPERTIES COMPILE_OPTIONS
               "${_hp_kernel_flags};-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;${_hp_wide};${_hp_unchecked}")
endif()
set_source_files_properties(
  ${_hp_kernels}_baseline.cc ${_hp_kernels}_avx2.cc ${_hp_kernels}_avx512.cc
  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON SKIP_PRECOMPILE_HEADERS ON)
