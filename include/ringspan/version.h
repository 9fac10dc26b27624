/* The version of the library, for the preprocessor of C and C++; ringspan_version() of ringspan_c.h is that of the library that
 * was linked. */
#ifndef RINGSPAN_VERSION_H_
#define RINGSPAN_VERSION_H_

#define RINGSPAN_VERSION_MAJOR 0
#define RINGSPAN_VERSION_MINOR 1
#define RINGSPAN_VERSION_PATCH 0
/* 10000 * major + 100 * minor + patch */
#define RINGSPAN_VERSION (10000 * RINGSPAN_VERSION_MAJOR + 100 * RINGSPAN_VERSION_MINOR + RINGSPAN_VERSION_PATCH)

#endif /* RINGSPAN_VERSION_H_ */
