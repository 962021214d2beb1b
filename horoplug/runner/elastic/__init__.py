"""What ``horovodrun`` needs for jobs whose hosts come and go: which hosts there are, and which of them may be used."""
