"""Files that are something else than their names say."""

POINTER = """version https://git-lfs.github.com/spec/v1
oid sha256:%s
size 99
""" % ('0' * 64)
PAGE = '<!DOCTYPE html>\n<html><body>Not found</body></html>\n'
