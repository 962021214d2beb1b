# The compiler of the wheels: clang in the package ziglang of PyPI, with the headers and symbols of an old glibc, for any
# architecture. Its C++ runtime becomes part of each library.
#   -DHOROPLUG_ZIG=/path/of/zig -DHOROPLUG_ZIG_TARGET=x86_64-linux-gnu.2.17 -DHOROPLUG_ZIG_HEADERS=/folder/to/search/last
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES HOROPLUG_ZIG HOROPLUG_ZIG_TARGET HOROPLUG_ZIG_HEADERS)
string(REGEX REPLACE "-.*" "" CMAKE_SYSTEM_PROCESSOR "${HOROPLUG_ZIG_TARGET}")
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_CXX_COMPILER "${HOROPLUG_ZIG}" c++ -target ${HOROPLUG_ZIG_TARGET})
# Paths in messages of assertions are the same in every folder. Without optimisation, as in some tests, zig turns on checks
# for undefined behaviour, for which other code has no functions.
set(CMAKE_CXX_FLAGS_INIT "-ffile-prefix-map=${CMAKE_SOURCE_DIR}=. -fno-sanitize=undefined -idirafter ${HOROPLUG_ZIG_HEADERS}")
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
