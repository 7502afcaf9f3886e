//! A list that mostly has one item: that one needs no memory of its own.

use std::ops::Deref;

/// Read as a slice. Clones are whole copies.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Few<T>(Items<T>);

/// A list of one is always `One`, so that equal lists are equal values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Items<T> {
    One(T),
    Others(Box<[T]>),
}

impl<T> Few<T> {
    /// Changes it as a vector.
    pub fn change(&mut self, change: impl FnOnce(&mut Vec<T>)) {
        let mut list = match std::mem::take(self).0 {
            Items::One(item) => vec![item],
            Items::Others(items) => items.into_vec(),
        };
        change(&mut list);
        *self = list.into();
    }
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self(Items::Others(Box::default()))
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Items::One(item) => std::slice::from_ref(item),
            Items::Others(items) => items,
        }
    }
}

impl<T> From<T> for Few<T> {
    fn from(item: T) -> Self {
        Self(Items::One(item))
    }
}

impl<T> From<Vec<T>> for Few<T> {
    fn from(mut items: Vec<T>) -> Self {
        match items.pop() {
            Some(item) if items.is_empty() => Self(Items::One(item)),
            last => {
                items.extend(last);
                Self(Items::Others(items.into()))
            }
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Vec::from_iter(items).into()
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_item_lies_in_the_list_itself() {
        assert_eq!(size_of::<Few<Arc<str>>>(), 24);
        assert_eq!(size_of::<Few<Arc<u64>>>(), 16);
        assert_eq!(size_of::<Few<IpAddr>>(), 24);
        let one: Few<u8> = vec![7].into();
        assert!(matches!(one.0, Items::One(7)));
    }

    #[test]
    fn it_is_the_list_that_it_was_made_of_and_changes_like_one() {
        for length in 0..4 {
            let items: Vec<u8> = (0..length).collect();
            let mut few = Few::from(items.clone());
            assert_eq!((&*few, few.iter().count()), (&*items, items.len()));
            few.change(|list| list.push(9));
            assert_eq!(few, items.iter().copied().chain([9]).collect());
            few.change(|list| list.retain(|item| *item == 9));
            assert_eq!(few, Few::from(9));
            few.change(Vec::clear);
            assert_eq!(few, Few::default());
        }
    }
}
