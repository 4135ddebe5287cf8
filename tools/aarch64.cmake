# Toolchain file: aarch64 Linux by Debian's cross compiler, its programs run by qemu. Packages:
# g++-aarch64-linux-gnu, qemu-user.
#   cmake -S . -B build/aarch64 -G Ninja --toolchain tools/aarch64.cmake -DLSHKIT_PYTHON=OFF
#     -DLSHKIT_TESTS=ON && cmake --build build/aarch64 && ctest --test-dir build/aarch64
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
