# Toolchain file: Windows by Debian's cross compiler, its programs run by Wine. Packages:
# g++-mingw-w64-x86-64-posix, wine.
#   cmake -S . -B build/mingw -G Ninja --toolchain tools/mingw.cmake -DLSHKIT_PYTHON=OFF
#     -DLSHKIT_TESTS=ON && cmake --build build/mingw && ctest --test-dir build/mingw
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
set(CMAKE_FIND_ROOT_PATH /usr/x86_64-w64-mingw32)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)  # GCC's libraries are not on Wine's PATH
set(CMAKE_CROSSCOMPILING_EMULATOR wine)
